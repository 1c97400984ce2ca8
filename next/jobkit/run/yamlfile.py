"""YAML without its traps, with the line of each key: the values that a person wrote are the values of the program.

read_yaml(path) -> Document(values, lines, bare_none)     load.py, the user's own file, config.yaml of a run
parse_value("1e-3") -> 0.001                              key=value of a command line, points of a sweep
dump(values) -> text                                      config.yaml
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jobkit.errors import InputError, nearest


@dataclass(frozen=True)
class Document:
    """The value of a YAML text; the mapping of a YAML file."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    """The line, from 1, of each dotted key; `sweep.0.seed` within a list."""
    bare_none: list[str] = field(default_factory=list)
    """Dotted keys whose whole value is `None` or `none` without quotes: a text for YAML, and a Python user's null. An
    empty key is the whole text."""


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


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this loader, or another reader of YAML 1.1, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeLoader.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}
_NONE = re.compile(r"[Nn]one$")
_Dumper.add_implicit_resolver("!none", _NONE, list("Nn"))  # so that the text `none` gets quotes


def dump(value: Any) -> str:
    """YAML that `read_yaml` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def in_a_line(value: Any) -> str:
    """A value as `parse_value` reads it back, in a line."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").rstrip("\n")


def parse_value(text: str) -> Any:
    """The value of a YAML scalar or flow collection, as it stands behind `key=` on a command line. Raises ValueError,
    with a sentence for the user."""
    return parse_document(text).value


def parse_document(text: str) -> Document:
    """The same as `parse_value`, with the keys whose value is `None`."""
    try:
        node, document = _load(text)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ValueError("the value is not valid YAML; quote it") from error
    if text[node.end_mark.index if node else 0 :].strip():
        raise ValueError("the value has a comment; quote it")  # `a #3` would lose a part
    return document


def read_yaml(path: Path) -> Document:
    """The mapping in a file. Raises InputError with file and line."""
    text = read_text(path)
    try:
        _, document = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"not valid YAML: {problem}").at(path, mark.line + 1 if mark else None) from None
    except (ValueError, TypeError, RecursionError) as error:  # a tag that promises another type; a value in itself
        raise InputError(f"not valid YAML: {error}").at(path) from None
    if not isinstance(document.value, dict):
        raise InputError(found=document.value, allowed="`key: value` lines, as in name: toy").at(path)
    return document


def _load(text: str) -> tuple[yaml.Node | None, Document]:
    loader = _Loader(text)
    node: yaml.Node | None = loader.get_single_node()
    document = Document(None if node is None else loader.construct_document(node))
    _collect(node, "", document)
    return node, document


def _collect(node: yaml.Node | None, key: str, document: Document, *, in_list: bool = False) -> None:
    """Note the lines of the keys below a node. An item `None` of a list may be an argument of a command."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and _NONE.fullmatch(node.value) and not in_list:
        document.bare_none.append(key)
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        items = [(str(number), item, item) for number, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value_node) for key_node, value_node in node.value]
    for name, start, value in items:
        inner = f"{key}.{name}" if key else name
        document.lines[inner] = start.start_mark.line + 1
        _collect(value, inner, document, in_list=isinstance(node, yaml.SequenceNode))


def read_text(path: Path) -> str:
    """The content of a file that a person wrote, in UTF-8 whatever the locale of this node is. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [file.name for file in path.parent.glob("*") if file.suffix in (".yaml", ".yml", ".csv")]
        same_stem = [name for name in names if Path(name).stem == path.name]
        hint = f"did you mean {same_stem[0]!r}?" if same_stem else nearest(path.name, names)
        hint = "the YAML comes first, then key=value" if "=" in path.name else hint
        raise InputError("no such file", hint=hint).at(path) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"not UTF-8: found the byte {error.object[error.start]:#04x}").at(path, line) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}").at(path) from None
