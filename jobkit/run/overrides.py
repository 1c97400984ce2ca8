"""`key=value` of a command line: what it says, and whether there is such a key. `+key=value` may add one to params."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, InvalidValue, closest
from jobkit.run import secrets
from jobkit.run.yamlfile import parse_value

_NUMBERS = re.compile(r"[\d.+-][\w.+-]*(\s*,\s*[\d.+-][\w.+-]*)+,?")

NAMES_SHOWN = 12
"""How many params a refusal lists."""


@dataclass(frozen=True)
class Override:
    """One value that the command line sets."""

    text: str
    """As it was typed."""
    key: str
    """Dotted."""
    value: Any
    adds: bool
    """Whether the key may be a new one: it was typed with `+` before it."""


def parse(text: str) -> Override:
    """What a person typed. Raises InputError."""
    typed, equals, value = text.partition("=")
    adds, key = typed.startswith("+"), typed.removeprefix("+")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.\-]*(\[\d+\])?", key):
        raise InputError(f"command line: {text!r}: expected key=value, as in params.lr=1e-3")
    try:
        return Override(text, key, parse_value(value), adds)
    except Exception:  # a YAML error of whatever kind: the value was one person's typing
        raise InputError(f"command line: {text!r}: the value is not valid YAML; quote it") from None


def masked(text: str) -> str:
    """An override as others may see it."""
    return secrets.masked_override(text, parse(text).value)


def check(override: Override, values: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Refuse an override of what there is not; raises InvalidValue with the nearest names.

    Args:
        values: the config so far, nothing resolved in it.
        sections: the names of all top-level keys, each with the names of the keys below it.
    """
    top, *below = override.key.partition("[")[0].split(".")
    if top not in sections:
        allowed = ", ".join(sections)
        raise InvalidValue(override.key, f"unknown key{_meant(override.key, values, sections)} (allowed: {allowed})")
    if top == "params":
        _refuse_list_for_a_number(override, values)
    if top == "params" and not override.adds:
        params = values.get("params")
        for key, siblings in _new_params(params if isinstance(params, Mapping) else {}, below, override.value):
            dotted = ".".join(("params", *key))
            parent = ".".join(("params", *key[:-1]))
            shown = [str(one) for one in siblings]
            there = ", ".join(shown[:NAMES_SHOWN]) + (", ..." if len(shown) > NAMES_SHOWN else "")
            has = f"{parent} has: {there}" if shown else f"{parent} has no keys"
            found = closest(key[-1], shown)
            hint = f"; did you mean '{parent}.{found}'?" if found is not None else ""
            raise InvalidValue(dotted, f"there is no such key{hint} ({has}; to add one: +{dotted}=...)")


def _refuse_list_for_a_number(override: Override, values: Mapping[str, Any]) -> None:
    """Refuse `params.lr=1,2` where the file has a number: it is a sweep, and would be a text."""
    present: Any = values
    for name in override.key.split("."):
        present = present.get(name) if isinstance(present, Mapping) else None
    is_list = isinstance(override.value, str) and _NUMBERS.fullmatch(override.value)
    typed = override.text.partition("=")[2].strip()
    if is_list and isinstance(present, int | float) and typed == override.value:  # not in quotes
        hint = f"a run for each: --sweep {override.key}={override.value}; a list: {override.key}=[{override.value}]"
        raise InvalidValue(override.key, f"found the text '{override.value}' for a number, {present!r}; {hint}")


def _new_params(values: Any, key: Sequence[str], value: Any) -> Iterator[tuple[list[str], Iterable[str]]]:
    """The keys that setting `key` below `values` would add, each with the names that there are beside it."""
    if key:
        if isinstance(values, Mapping):
            name, *rest = key
            if name not in values:
                yield list(key[:1]), values
            else:
                yield from (([name, *found], beside) for found, beside in _new_params(values[name], rest, value))
        elif not (isinstance(values, list) or (isinstance(values, str) and "${" in values)):  # of those OmegaConf knows
            yield list(key[:1]), ()
    elif isinstance(value, Mapping) and isinstance(values, Mapping):  # it is merged into what is there
        for name, one in value.items():
            yield from _new_params(values, [str(name)], one)


def _meant(key: str, values: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> str:
    """What a key that is not there may have been meant to be: one at the top, or one of a section's or of params."""
    params = values.get("params")
    dotted = {name: f"{section}.{name}" for section, names in sections.items() for name in names}
    dotted |= {str(name): f"params.{name}" for name in (params if isinstance(params, Mapping) else {})}
    dotted = {section: section for section in sections} | dotted
    found = closest(key, dotted)
    return f"; did you mean {dotted[found]!r}?" if found is not None else ""


def refuse_sections_in_params(params: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Refuse `resources:` and the like that were indented under `params:`: they would have no effect there."""
    for name, keys in sections.items():
        found = params.get(name)
        if keys and isinstance(found, Mapping) and any(key in keys for key in found):
            raise InvalidValue(
                f"params.{name}",
                f"{name} is a section of its own, which has no effect under params: put it at the beginning of a line "
                "(or, if it is one of your own params, give it another name)",
            )
