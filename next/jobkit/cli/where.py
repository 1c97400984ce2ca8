"""Conditions on values, as in `--where 'params.lr>=0.03'`, and the order of `--sort`. Pure: no file is read.

parse("params.lr>=0.03").is_met_by(0.1)     # True
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from jobkit.errors import InputError

T = TypeVar("T")

FORM = "KEY OP VALUE with one of = != <= >= < > ~ (a regular expression), as in 'params.lr>=0.03'"

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(==?|!=|<=|>=|<|>|~)\s*((?![=<>]).+?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """One condition on a run."""

    key: str
    operator: str
    text: str
    """The value as it was typed."""

    def is_met_by(self, value: Any) -> bool:
        """Return whether a value meets it; None meets `=null` alone, and no text is above or below a number."""
        if self.operator == "~":
            return value is not None and re.search(self.text, str(value)) is not None
        wanted = _typed(self.text)
        if value is None or wanted is None:
            return value is wanted if self.operator in ("=", "==") else self.operator == "!=" and value is not None
        if self.operator not in _ORDERS:
            return (value == wanted or str(value) == self.text) == (self.operator != "!=")
        try:
            return _ORDERS[self.operator](value, wanted)
        except TypeError:
            return False


def parse(text: str) -> Condition:
    """Return the condition of a text. Raises InputError."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is None or (match[2] == "~" and not re.compile(match[3])):
            raise ValueError
    except (ValueError, re.error) as error:
        raise InputError(str(error), key="--where", found=text, allowed=FORM) from None
    return Condition(match[1], match[2], match[3])


def ordered(items: Iterable[T], value_of: Callable[[T], Any], *, largest_first: bool) -> list[T]:
    """Return items by a value; those without one come last in both directions."""
    pairs = [(value_of(item), item) for item in items]
    ranked = [
        ((not isinstance(value, (int, float)), value if isinstance(value, (int, float)) else str(value)), item)
        for value, item in pairs
        if value is not None
    ]
    ranked.sort(key=lambda pair: pair[0], reverse=largest_first)
    return [item for _, item in ranked] + [item for value, item in pairs if value is None]


def _typed(text: str) -> Any:
    """The value that a text means: a number, true, false, null, a list; any other text is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text.lower() == "none" else text
