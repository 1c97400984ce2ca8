"""Conditions on values, as in `--where 'params.lr>=0.03'`, and the order of `--sort`. Pure: no file is read.

parse("params.lr>=0.03").is_met_by(0.1)     # True
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from jobkit.errors import InputError

T = TypeVar("T")

FORM = "KEY OP VALUE with one of == = != <= >= < > ~ (a regular expression), as in 'params.lr>=0.03'"

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(==|!=|<=|>=|=|<|>|~)\s*((?![=<>]).*?)\s*", re.DOTALL)

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
    """One of `=`, `!=`, `<`, `<=`, `>`, `>=`, `~`."""
    text: str
    """The value as it was typed."""

    def is_met_by(self, value: Any) -> bool:
        """Return whether a value meets it; None meets `=null` alone, and a text is never above or below a number."""
        if value is None or self.text.lower() in ("null", "none"):
            is_null = value is None and self.text.lower() in ("null", "none")
            return is_null if self.operator == "=" else self.operator == "!=" and value is not None
        if self.operator == "~":
            return re.search(self.text, value if isinstance(value, str) else json.dumps(value)) is not None
        wanted = _like(value, self.text)
        if wanted is None:
            return False
        if self.operator in ("=", "!="):
            is_equal = value == wanted or (_is_nan(value) and _is_nan(wanted))
            return is_equal == (self.operator == "=")
        if isinstance(value, str) and _number(self.text) is not None:
            return False
        return isinstance(value, (int, float, str)) and _ORDERS[self.operator](value, wanted)


def parse(text: str) -> Condition:
    """Return the condition of a text. Raises InputError."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise InputError(key="--where", found=text, allowed=FORM)
    condition = Condition(match[1], "=" if match[2] == "==" else match[2], match[3])
    if condition.operator == "~":
        try:
            re.compile(condition.text)
        except re.error as error:
            raise InputError(str(error), key="--where", found=text, allowed="a regular expression behind ~") from None
    return condition


def ordered(items: Iterable[T], value_of: Callable[[T], Any], *, largest_first: bool) -> list[T]:
    """Return items by a value: numbers, then texts; None and NaN come last in both directions."""
    keyed = [(_order(value_of(item)), item) for item in items]
    ranked = sorted(
        (pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0][1:], reverse=largest_first
    )
    ranked.sort(key=lambda pair: pair[0][0])
    return [item for _, item in ranked] + [item for order, item in keyed if order is None]


def _order(value: Any) -> Any:
    if value is None or _is_nan(value):
        return None
    return (
        (0, value, "") if isinstance(value, (int, float)) else (1, 0, value if isinstance(value, str) else str(value))
    )


def _like(value: Any, text: str) -> Any:
    """The text in the kind of a value; None where it has no such meaning."""
    if isinstance(value, str):
        return text
    if isinstance(value, bool):
        return {"true": True, "false": False}.get(text.lower())
    if isinstance(value, (int, float)):
        return _number(text)
    try:
        return json.loads(text)
    except ValueError:
        return None


def _number(text: str) -> int | float | None:
    try:
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)  # a large int is no float
    except ValueError:
        return None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
