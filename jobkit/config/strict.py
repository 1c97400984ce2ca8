"""Dataclasses from plain values, strictly typed: an unknown key or a wrong type is an InputError that names it.

    build(Resources, {"nodes": "2"}, "resources.")     InputError: resources.nodes: found '2', expected a whole number

load.py builds a Config by it and reads the user's own file, plan.py a cluster's sections, worker/script.py the Config
of a script.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from jobkit.errors import InputError, nearest

T = TypeVar("T")


def build(cls: type[T], values: Any, prefix: str = "", unknown: list[str] | None = None) -> T:
    """An instance of the dataclass `cls` from `values`; nested dataclasses are built in the same way.

    The metadata of a field may hold `is_allowed`, a function of a value, and `allowed`, the words for what it takes.
    `prefix` stands before the keys in errors, with a dot at its end. Unknown keys are left out, and appended to
    `unknown`, where that is given.
    """
    if not isinstance(values, Mapping):
        raise InputError(key=prefix.rstrip("."), found=values, allowed=f"a mapping with {names_of(cls)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = _hints(typing.cast("Any", cls))
    for key in values:
        if key not in fields and unknown is not None:
            unknown.append(f"{prefix}{key}")
        elif key not in fields:
            hint = nearest(str(key), fields)
            raise InputError("unknown key", key=f"{prefix}{key}", hint=hint, allowed=names_of(cls))
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        full_key = f"{prefix}{name}"
        if name in values:
            arguments[name] = _value(hints[name], values[name], full_key, unknown)
            if "allowed" in field.metadata and not field.metadata["is_allowed"](arguments[name]):
                raise InputError(key=full_key, found=values[name], allowed=field.metadata["allowed"])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError("missing; it is required", key=full_key, allowed=describe(hints[name]))
    return cls(**arguments)


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields; a sweep builds thousands of configs."""
    return typing.get_type_hints(cls)


def names_of(cls: type[Any]) -> str:
    """The names of the fields of a dataclass, in a line."""
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _value(kind: Any, value: Any, key: str, unknown: list[str] | None) -> Any:
    optional = [inner for inner in typing.get_args(kind) if dataclasses.is_dataclass(inner)]
    if optional and value is None:
        return None
    if optional:
        kind = optional[0]
    if dataclasses.is_dataclass(kind):
        return build(typing.cast("type[Any]", kind), value, f"{key}.", unknown)
    if not _matches(kind, value):
        # YAML reads off, no, on and yes without quotes as booleans.
        hint = "put it in quotes" if isinstance(value, bool) and describe(kind) == "a text" else ""
        raise InputError(key=key, found=value, allowed=describe(kind), hint=hint)
    if typing.get_origin(kind) is typing.Literal and value not in typing.get_args(kind):
        raise InputError(key=key, found=value, allowed=describe(kind), hint=nearest(value, typing.get_args(kind)))
    return value


def _matches(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is typing.Literal:
        return isinstance(value, str)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(inner, value) for inner in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(arguments[1], item) for item in value.values())
    if kind in (int, float) and isinstance(value, bool):
        return False  # `nodes: yes` is a mistake, although bool is an int for Python
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """A type in the words of the author of a YAML."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(inner) for inner in arguments)
    if origin is typing.Literal:
        return " or ".join([", ".join(map(str, arguments[:-1])), str(arguments[-1])][len(arguments) == 1 :])
    if origin is list:
        return "a list of texts" if arguments == (str,) else f"a list, each {describe(arguments[0])}"
    if kind is dict or origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    words = {int: "a whole number", str: "a text", bool: "true or false", float: "a number", type(None): "nothing"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
