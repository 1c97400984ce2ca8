"""Reading YAML so that what a person wrote is what the program gets, and so that an error can name the line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from jobkit.errors import InputError, nearest

DEEPEST = 40
"""How many values may lie within each other: what reads them calls itself for each."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 less its traps: `1e-3` is a number, `1:00:00` and a date are texts, a key is one and stands once."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:
            here = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} values within each other", here)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        self.deep_construct = True  # so that a value that is within itself is refused
        return super().construct_document(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        str(value)  # ValueError for one, in hexadecimal, that Python does not print
        return value

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
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
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


def dump(value: Any) -> str:
    """YAML that `read_yaml` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def in_a_line(value: Any) -> str:
    """A value as `parse_value` reads it."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").rstrip("\n")


def parse_value(text: str) -> Any:
    """The value of one YAML scalar or flow collection, as it stands behind `key=` on a command line.

    Raises YAMLError, also for a comment: what was meant to be a value, as `#3`, would be lost.
    """
    node, value = _load(text)
    if text[node.end_mark.index if node else 0 :].strip():
        raise yaml.YAMLError("a comment")
    return value


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    """What a text says, and the node of it, which knows the lines: PyYAML's own functions read it once for each."""
    loader = _Loader(text)
    node: yaml.Node | None = loader.get_single_node()
    return node, None if node is None else loader.construct_document(node)


def read_text(path: Path) -> str:
    """What is in a file that a person has written, in UTF-8 whatever the locale: a node's may be another than that of
    the shell that submits. Raises InputError, which names it."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file{_meant(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8: found the byte {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _meant(path: Path) -> str:
    """A file beside one that is not there; for an override in its place how the words stand."""
    if "=" in path.name:
        return "; the YAML comes first, then key=value"
    names = [one.name for one in path.parent.glob("*") if one.suffix in (".yaml", ".yml", ".csv")]
    own = [name for name in names if Path(name).stem == path.name]
    return f"; did you mean {own[0]!r}?" if own else nearest(path.name, names)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a file, and the line (from 1) of each dotted key, `sweep.0.seed` in a list. Raises InputError
    with file and line."""
    text = read_text(path)
    try:
        node, value = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else f"{path}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{place}: not valid YAML: {problem}") from None
    except (ValueError, TypeError) as error:  # a scalar whose tag promises what it is not
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if value is None:
        raise InputError(f"{path}: the file is empty; expected `key: value` lines, as in name: toy")
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(value).__name__}")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines)
    return value, lines


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        found = [(str(number), one, one) for number, one in enumerate(node.value)]
    else:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = [(str(key_node.value), key_node, value_node) for key_node, value_node in pairs]
    for name, start, value in found:
        lines[f"{prefix}{name}"] = start.start_mark.line + 1
        _collect_lines(value, f"{prefix}{name}.", lines)
