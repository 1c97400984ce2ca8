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

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(=|!=|<=|>=|<|>|~)\s*((?![=<>]).+?)\s*", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


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
        try:
            wanted = json.loads(self.text)
        except ValueError:  # a text without quotes
            wanted = self.text
        is_equal = value == wanted or (value is not None and str(value) == self.text)
        if self.operator == "=":
            return is_equal
        if self.operator == "!=":
            return not is_equal and value is not None
        try:
            return bool(_ORDERS[self.operator](value, wanted))
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
    """Return items by a value, numbers before texts; those without one come last in both directions."""

    def rank(item: T) -> tuple[bool, Any]:
        value = value_of(item)
        return (False, value) if isinstance(value, (int, float)) else (True, str(value))

    with_value = [item for item in items if value_of(item) is not None]
    return sorted(with_value, key=rank, reverse=largest_first) + [item for item in items if value_of(item) is None]
