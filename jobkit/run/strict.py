"""Building a dataclass from a mapping, strictly: an unknown key or a wrong type is named."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jobkit.errors import InvalidValue, nearest
from jobkit.run.habits import VALUES, elsewhere

T = TypeVar("T")


def build(cls: type[T], values: Any, prefix: str = "") -> T:
    """An instance of the dataclass `cls` from `values`; nested dataclasses are built likewise.

    A field's metadata may hold `check`, a function that raises ValueError, with what is allowed as its text.
    `prefix` stands before the keys of `values`, with a dot at its end.
    Raises InvalidValue with the key, what was found, what is allowed and the nearest valid name.
    """
    if not isinstance(values, Mapping):
        raise InvalidValue(prefix.rstrip("."), f"found {values!r}, expected a mapping with {_names(cls)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            hint = elsewhere(f"{prefix}{key}") or nearest(str(key), fields)
            raise InvalidValue(f"{prefix}{key}", f"unknown key{hint} (allowed: {_names(cls)})")
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _value(hints[name], values[name], f"{prefix}{name}", field.metadata.get("check"))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidValue(f"{prefix}{name}", "missing; it is required")
    return cls(**arguments)


def _names(cls: type[Any]) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _value(kind: Any, value: Any, key: str, check: Callable[[Any], object] | None) -> Any:
    optional = [one for one in typing.get_args(kind) if dataclasses.is_dataclass(one)]
    if optional and value is None:
        return None
    if optional:
        kind = optional[0]
    if dataclasses.is_dataclass(kind):
        return build(typing.cast("type[Any]", kind), value, f"{key}.")
    if not _matches(kind, value):
        # YAML's off, no, on and yes without quotes.
        hint = "; put it in quotes" if isinstance(value, bool) and describe(kind) == "a text" else ""
        raise InvalidValue(key, f"found {value!r}, expected {describe(kind)}{hint}")
    if typing.get_origin(kind) is typing.Literal and value not in typing.get_args(kind):
        allowed = [str(one) for one in typing.get_args(kind)]
        raise InvalidValue(key, f"found {value!r}, allowed: {', '.join(allowed)}{_meant(key, str(value), allowed)}")
    if check is not None:
        try:
            check(value)
        except ValueError as error:
            raise InvalidValue(key, f"found {value!r}, expected {error}") from None
    return value


def _matches(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is typing.Literal:
        return isinstance(value, str)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(one, value) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(arguments[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(arguments[1], one) for one in value.values())
    if kind in (int, float) and isinstance(value, bool):
        return False  # `nodes: yes` is a mistake, though bool is an int to Python
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """A type in the words of a YAML's author."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(one) for one in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is list:
        return "a list of texts" if arguments == (str,) else f"a list, each {describe(arguments[0])}"
    if kind is dict or origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(kind):
        return "a mapping"
    words = {int: "a whole number", str: "a text", bool: "true or false", float: "a number", type(None): "nothing"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _meant(key: str, value: str, allowed: Sequence[str]) -> str:
    """The hint for a value that there is not: what others call one that there is, else the nearest."""
    named = VALUES.get(key, {}).get(value.lower())
    return f"; did you mean {named!r}?" if named else nearest(value, allowed)
