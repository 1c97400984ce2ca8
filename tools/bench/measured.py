"""The one form in which a bench tells what it has measured: a row of the table that tools/bench/all.py makes.

A bench prints each row to stdout as a line of JSON that begins with `{"row": `; other lines are for people, and
all.py passes them over. The keys:

    row       what was measured, in the words of the table: "step, 2 ranks, logging every step"
    against   what it is compared with: "the loop by hand"; "" where the value stands for itself
    unit      "times" where value is ours over theirs; else "s", "images/s" ...
    value     the median of `values`; absent where there is none
    values    one number a repeat, each measured beside its peer so that a busy machine slows both
    bound     what value may be at most (at least, where `better` is "higher"); null where nothing is asked
    better    "lower" or "higher"
    met       whether value is within the bound; null where there is no bound
    note      what a reader has to know: the absolute values, sizes; "" where nothing
    missing   why nothing was measured, as a peer that is not installed; absent otherwise

    from measured import Row, missing, tell
    tell(Row("step, 2 ranks", "the loop by hand", [1.01, 1.02, 1.02], bound=1.03))
    tell(missing("step, 2 ranks", "Lightning", "lightning is not installed"))

`Row.below` is for "below": the value must be less than the bound, not equal to it.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

START = '{"row": '
"""What a line of a row begins with."""


@dataclass(frozen=True)
class Row:
    """What a bench has measured, or could not."""

    row: str
    against: str = ""
    values: Sequence[float] = field(default_factory=list)
    bound: float | None = None
    unit: str = "times"
    better: str = "lower"
    below: bool = False
    """Whether a value equal to the bound misses it."""
    note: str = ""
    missing: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bound; None where there is none to be within."""
        if self.bound is None or not self.values:
            return None
        if self.below and self.value == self.bound:
            return False
        return self.value <= self.bound if self.better == "lower" else self.value >= self.bound

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest; of eight or more values the quartiles, which one bad repeat does not move."""
        if len(self.values) < 8:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"row": self.row, "against": self.against, "unit": self.unit}
        if self.values:
            told |= {"value": _digits(self.value), "values": [_digits(value) for value in self.values]}
        told |= {"bound": self.bound, "better": self.better, "met": self.met, "note": self.note}
        if self.below:
            told["below"] = True
        return told | ({"missing": self.missing} if self.missing else {})


def missing(row: str, against: str, reason: str, bound: float | None = None) -> Row:
    """A row of which nothing was measured."""
    return Row(row, against, bound=bound, missing=reason)


def tell(row: Row) -> None:
    """Print it, for people and for all.py."""
    print(json.dumps(row.as_dict()), flush=True)


def parse(text: str) -> list[Row]:
    """The rows in what a bench has printed."""
    rows = []
    for line in text.splitlines():
        if line.startswith(START):
            told = json.loads(line)
            rows.append(Row(**{key: told[key] for key in told if key not in ("value", "met")}))
    return rows


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, repeat by repeat."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def absolute(ours: Sequence[float], theirs: Sequence[float], unit: str = "s", scale: float = 1.0) -> str:
    """The medians behind a ratio, as a note."""
    one, other = (scale * statistics.median(values) for values in (ours, theirs))
    return f"{_digits(one)} against {_digits(other)} {unit}"


def is_installed(*modules: str) -> bool:
    """Whether a peer is there to be measured."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _digits(value: float) -> float:
    """Four significant digits: more says nothing about a measurement."""
    return float(f"{value:.4g}")
