"""YAML without its traps, with the place of each key: the values that a person wrote are the values of the program.

read_yaml(path) -> (mapping, places)     load.py, the user's own file, config.yaml of a run
parse_value("1e-3", key) -> 0.001        key=value of a command line
dump(values) -> text                     config.yaml
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jobkit.disk import may_return
from jobkit.errors import InputError, nearest

COMMAND_LINE = "command line"


@dataclass
class KeyLocations:
    """Where each value was written: the file and line in front of every error about it."""

    file: Path | str
    by_key: dict[str, tuple[Path | str, int | None]] = field(default_factory=dict)
    """Dotted key -> file and line, from 1; `sweep.0.seed` within a list."""

    def locate(self, error: InputError) -> InputError:
        """The error with the file and line of its key, or of the nearest key above it that somebody wrote."""
        key = error.key
        while key and key not in self.by_key:
            key = key.rpartition(".")[0]
        return error.at(*self.by_key.get(key, (self.file, None)))

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Give every InputError of a block its place."""
        try:
            yield
        except InputError as error:
            raise self.locate(error) from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 in which `1e-3` is a number, `1:00:00` and dates are texts, and a key is a text that occurs once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise _error(f"found the key {key!r}, expected a text", key_node)
            if key in seen:
                raise _error(f"the key {key!r} occurs twice", key_node)
            seen.add(key)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_INT, _FLOAT, _MERGE = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:merge"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # in C five times as fast
    """Quotes every text that this loader, or another reader of YAML 1.1, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeLoader.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}
_NONE = re.compile(r"None$")
_Dumper.add_implicit_resolver("!none", _NONE, ["N"])  # so that the text `None` gets quotes


def dump(value: Any) -> str:
    """YAML that `read_yaml` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def dump_in_line(value: Any) -> str:
    """A value as `parse_value` reads it: it can stand behind `key=`."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=1 << 30
    )
    return text.strip()[1:-1]


def split_values(text: str) -> list[str] | None:
    """The texts of the values of `a,[b,c],'d,e'`; None where they cannot be told apart, or one of them is empty."""
    try:
        node = yaml.compose(f"[{text}]", Loader=_Loader)
    except yaml.YAMLError:
        return None
    ends = text.rstrip().endswith(",")  # which YAML allows
    if not isinstance(node, yaml.SequenceNode) or ends or node.end_mark.index != len(text) + 2:
        return None
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1].strip() for item in node.value]


def parse_value(text: str, key: str) -> Any:
    """The value of a YAML scalar or flow collection, as it stands behind `key=`. Raises InputError."""
    try:
        value, node = _load(text, KeyLocations(COMMAND_LINE), key)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        raise InputError("the value is not valid YAML; quote it", key=key, found=text) from None
    if node is None or text[node.end_mark.index :].strip():  # `a #3` would lose a part, and `#fff` all
        raise InputError("the value has a comment; quote it", key=key, found=text)
    return value


def read_yaml(path: Path) -> tuple[dict[str, Any], KeyLocations]:
    """The mapping in a file, in UTF-8 whatever the locale of this node is. Raises InputError with file and line, and
    OSError where the disk is away: that is no mistake of a person."""
    places = KeyLocations(path)
    try:
        value, _ = _load(path.read_text(encoding="utf-8"), places)
    except FileNotFoundError:
        names = [file.name for file in path.parent.glob("*.y*ml")]
        hint = "the YAML comes first, then key=value" if "=" in path.name else nearest(f"{path.stem}.yaml", names)
        raise InputError("no such file", hint=hint).at(path) from None
    except OSError as error:
        if may_return(error):
            raise
        raise InputError(f"cannot be read: {error.strerror}").at(path) from None
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8").at(path, error.object.count(b"\n", 0, error.start) + 1) from None
    except yaml.MarkedYAMLError as error:
        raise InputError(f"not valid YAML: {error.problem}").at(
            path, error.problem_mark.line + 1 if error.problem_mark else None
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a tag that promises another type
        raise InputError(f"not valid YAML: {str(error).splitlines()[0]}").at(path) from None
    if not isinstance(value, dict):
        raise InputError(found=value, allowed="`key: value` lines, as in name: toy").at(path)
    return value, places


def _load(text: str, places: KeyLocations, key: str = "") -> tuple[Any, yaml.Node | None]:
    loader = _Loader(text)
    node: yaml.Node | None = loader.get_single_node()
    value = None if node is None else loader.construct_document(node)
    with places.locating():
        _collect(node, key, places)
    return value, node


def _collect(node: yaml.Node | None, key: str, places: KeyLocations) -> None:
    """Note the places of the keys below a node. Raises InputError for a value `None`, which is a text for YAML, and a
    Python user's null; a word of a command may be `None`."""
    is_none = isinstance(node, yaml.ScalarNode) and node.style is None and _NONE.fullmatch(node.value)
    if is_none and not key.startswith("command."):
        raise InputError(key=key, found="None", allowed="null for no value, or quotes around the text")
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        items = [(str(number), item, item) for number, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value_node) for key_node, value_node in node.value]
    for name, start, value in items:
        inner = f"{key}.{name}" if key else name
        places.by_key[inner] = (places.file, start.start_mark.line + 1 if isinstance(places.file, Path) else None)
        _collect(value, inner, places)
