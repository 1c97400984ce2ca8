"""`key=value` of a command line or of a sweep's point: its meaning, and its place in the tree of config values.

params.lr=3e-4          sets a param that the YAML has
+params.warmup=100      may add one, and may change the type of a value
resources.nodes=2       any key of the schema
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, closest
from jobkit.run.schema import DROPPED, SECTIONS
from jobkit.run.yamlfile import parse_document

COMMAND_LINE = "command line"

KEYS_SHOWN = 12
"""How many keys of `params` a refusal lists."""

_KEY = r"[A-Za-z_][\w.\-]*(\[\d+\])?"


@dataclass(frozen=True)
class Override:
    """A value that the command line, or a point of a sweep, sets."""

    key: str
    """Dotted, as `params.widths.0`."""
    value: Any
    adds: bool
    """True if it was typed with `+`."""

    @property
    def keys(self) -> list[str]:
        """The dotted keys that it sets: `clusters.big={nodes: 5}` sets `clusters.big.nodes`, too."""
        return [self.key, *keys_below(self.value, f"{self.key}.")]


def parse(text: str, place: str = COMMAND_LINE) -> Override:
    """The meaning of `key=value` or `+key=value`, written at a place. Raises InputError."""
    typed, equals, value = text.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", typed.removeprefix("+"))
    try:
        if not equals or not re.fullmatch(_KEY, typed.removeprefix("+")):
            raise InputError(f"{text!r}", allowed="key=value, as in params.lr=1e-3")
        if not value.strip():
            raise InputError("no value", key=key, hint=f"for none: {typed}=null; for an empty text: {typed}='\"\"'")
        document = parse_document(value)
        refuse_bare_none([f"{key}.{inner}".rstrip(".") for inner in document.bare_none])
    except ValueError as error:
        raise InputError(str(error), key=key, found=value).at(place) from None
    except InputError as error:
        raise error.at(place) from None
    return Override(key, document.value, typed.startswith("+"))


def refuse_bare_none(keys: Sequence[str]) -> None:
    """Refuse `None`, which is a text for YAML; `comm.hook` has a word of that name."""
    for key in keys:
        if not key.endswith("comm.hook"):
            raise InputError(key=key, found="None", allowed="null for no value, or quotes around the text")


def keys_below(values: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree of mappings."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        yield f"{prefix}{name}"
        yield from keys_below(value, f"{prefix}{name}.")


def apply(override: Override, values: Mapping[str, Any]) -> dict[str, Any]:
    """The config values with the override. Raises InputError for a key that is neither in the schema nor in params."""
    top, *below = override.key.split(".")
    if top in DROPPED:
        raise InputError("no longer a key", key=override.key, hint=DROPPED[top])
    if top not in SECTIONS:
        hint = _key_meant(override.key, values)
        raise InputError("unknown key", key=override.key, hint=hint, allowed=", ".join(SECTIONS))
    is_strict = top == "params" and not override.adds
    present = values.get(top)
    if top == "params" and present is None:
        present = {}
    return {**values, top: with_value(present, below, override.value, top, is_strict=is_strict)}


def with_value(present: Any, below: Sequence[str], value: Any, key: str = "", *, is_strict: bool = False) -> Any:
    """A tree with another value at some keys below it; a mapping is merged into the present one.

    Args:
        present: the tree, before interpolation
        below: the keys that lead to the value
        key: dotted key of the tree, for errors
        is_strict: refuse a key that the tree does not have, and a text in the place of a number (a slip, as `1e-3x`)
    """
    if not below and isinstance(value, Mapping) and isinstance(present, Mapping):
        for name, item in value.items():
            present = with_value(present, [str(name)], item, key, is_strict=is_strict)
        return present
    if not below:
        if is_strict:
            _check_kind(key, present, value)
        return value
    name, *rest = below
    inner_key = f"{key}.{name}".lstrip(".")
    if isinstance(present, list) and name.isdigit() and int(name) < len(present):
        index = int(name)
        inner = with_value(present[index], rest, value, inner_key, is_strict=is_strict)
        return [*present[:index], inner, *present[index + 1 :]]
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


def _check_kind(key: str, present: Any, value: Any) -> None:
    is_text = isinstance(value, str) and "${" not in value
    allowed = ""
    if isinstance(present, bool) and (is_text or isinstance(value, Mapping)):
        allowed = "true or false"
    elif type(present) in (int, float) and (is_text or isinstance(value, bool | Mapping)):
        allowed = f"a number, as {present!r}"
    elif isinstance(present, list | Mapping) and (is_text or isinstance(value, int | float)):
        allowed = f"a {'list' if isinstance(present, list) else 'mapping'}, as {present!r}"
    if allowed:
        several = f"several runs: --sweep {key}={value}; a list: {key}=[{value}]; " if "," in str(value) else ""
        raise InputError(key=key, found=value, allowed=allowed, hint=f"{several}+{key}=... takes any value")


def _key_meant(key: str, values: Mapping[str, Any]) -> str:
    """`did you mean 'params.lr'?` for `lr`: among top-level keys, keys of sections and params."""
    params = values.get("params")
    names = {name: f"{section}.{name}" for section, inner in SECTIONS.items() for name in inner}
    names |= {str(name): f"params.{name}" for name in (params if isinstance(params, Mapping) else {})}
    names |= {section: section for section in SECTIONS}
    match = closest(key.partition(".")[0], names) or closest(key.rpartition(".")[2], names)
    return f"did you mean {names[match]!r}?" if match else ""
