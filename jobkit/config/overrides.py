"""`key=value` of a command line: its meaning, and its place in the tree of config values.

params.lr=3e-4          sets a param that the YAML has, to a value of the same kind
+params.warmup=100      may add one, and may change the kind of a value
resources.nodes=2       any key of the schema

load.py applies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobkit.config.schema import DROPPED, SECTIONS
from jobkit.config.yamlfile import COMMAND_LINE, parse_value
from jobkit.errors import InputError, closest

KEYS_SHOWN = 12
"""How many keys of `params` a refusal lists."""

_KINDS = ((bool, "true or false"), ((int, float), "a number"), (list, "a list"), (Mapping, "a mapping"))


def apply(text: str, values: Mapping[str, Any], place: str = COMMAND_LINE) -> tuple[dict[str, Any], list[str]]:
    """The config values with `key=value` or `+key=value`, and the dotted keys that it sets.

    `place` is where the text is written. Raises InputError, also for a key that is neither in the schema nor in params.
    """
    try:
        typed, equals, written = text.partition("=")
        key = typed.removeprefix("+")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
            raise InputError(f"{text!r}", allowed="key=value, as in params.lr=1e-3")
        if not written.strip():
            raise InputError("no value", key=key, hint=f"for none: {key}=null; for an empty text: {key}='\"\"'")
        value = parse_value(written, key)
        top, *below = key.split(".")
        if top not in SECTIONS:
            meant = key_meant(key, values)
            hint = DROPPED.get(key) or (f"did you mean {meant!r}?" if meant else "")
            raise InputError("unknown key", key=key, hint=hint, allowed=", ".join(SECTIONS))
        is_strict = top == "params" and not typed.startswith("+")
        present = {} if top == "params" and values.get(top) is None else values.get(top)
        tree = with_value(present, below, value, top, is_strict=is_strict)
    except InputError as error:
        raise error.at(place) from None
    return {**values, top: tree}, [key, *keys_below(value, f"{key}.")]


def keys_below(values: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree of mappings."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        yield f"{prefix}{name}"
        yield from keys_below(value, f"{prefix}{name}.")


def with_value(present: Any, below: Sequence[str], value: Any, key: str = "", *, is_strict: bool = False) -> Any:
    """A tree with another value at some keys below it; a mapping is merged into the present one.

    Args:
        present: the tree, before interpolation
        below: the keys that lead to the value
        key: dotted key of the tree, for errors
        is_strict: refuse a key that the tree does not have, and a value of another kind (a slip, as `1e-3x`)
    """
    if not below and isinstance(value, Mapping) and isinstance(present, Mapping):
        for name, item in value.items():
            present = with_value(present, [str(name)], item, key, is_strict=is_strict)
        return present
    if not below:
        if is_strict:
            _refuse_other_kind(key, present, value)
        return value
    name, *rest = below
    inner_key = f"{key}.{name}".lstrip(".")
    present = {} if present in (None, "???") else present
    if not isinstance(present, Mapping) and not is_strict:
        raise InputError(key=key, found=present, allowed="a mapping")
    if not isinstance(present, Mapping) or (is_strict and name not in present):
        names = [str(name) for name in present] if isinstance(present, Mapping) else []
        match = closest(name, names)
        shown = f"{key} has {', '.join(names[:KEYS_SHOWN]) or 'no keys'}{', ...' if len(names) > KEYS_SHOWN else ''}"
        hint = f"did you mean '{key}.{match}'? " if match else ""
        raise InputError("there is no such key", key=inner_key, hint=f"{hint}({shown}; to add one: +{inner_key}=...)")
    return {**present, name: with_value(present.get(name), rest, value, inner_key, is_strict=is_strict)}


def _refuse_other_kind(key: str, present: Any, value: Any) -> None:
    kind = _kind(present)
    if kind and value is not None and _kind(value) != kind and "${" not in str(value):
        items = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        several = f"several runs: --sweep {key}={items}; a list: {key}=[{items}]; " if "," in items else ""
        hint = f"{several}+{key}=... takes any value"
        raise InputError(key=key, found=value, allowed=f"{kind}, as {present!r}", hint=hint)


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS if isinstance(value, kind)), "")


def key_meant(key: str, values: Mapping[str, Any]) -> str | None:
    """`params.lr` for `lr`, or the key most like it: of the top, of sections and of params."""
    params = values.get("params")
    names = {name: f"{section}.{name}" for section, inner in SECTIONS.items() for name in inner}
    names |= {str(name): f"params.{name}" for name in (params if isinstance(params, Mapping) else {})}
    names |= {section: section for section in SECTIONS}
    match = closest(key.partition(".")[0], names) or closest(key.rpartition(".")[2], names)
    return names[match] if match else None
