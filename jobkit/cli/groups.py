"""`list --group-by`: runs with the same values together, with the mean and the spread of what they found."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.cli.columns import text_of
from jobkit.cli.table import Cell, Table, number_text
from jobkit.run.summary import Summary, comparable


@dataclass(frozen=True)
class Spread:
    """Of some numbers their mean and sample standard deviation."""

    count: int
    mean: float
    deviation: float | None
    """None of fewer than two."""


@dataclass(frozen=True)
class Group:
    """Runs that have the same values of some names."""

    values: tuple[Any, ...]
    states: Counter[str]
    spreads: dict[str, Spread | None]
    """By metric; None where none of the runs has a number there."""


def spread(numbers: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation (n - 1); None of nothing."""
    if not numbers:
        return None
    count = len(numbers)
    mean = _mean(numbers)
    distance = math.hypot(*(number - mean for number in numbers))  # the squares of large ones would be too large
    return Spread(count, mean, distance / math.sqrt(count - 1) if count > 1 else None)


def _mean(numbers: Sequence[float]) -> float:
    if not all(map(math.isfinite, numbers)):
        return sum(numbers) / len(numbers)
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return math.fsum(number / len(numbers) for number in numbers)


def group(summaries: Sequence[Summary], keys: Sequence[str], metrics: Sequence[str]) -> list[Group]:
    """The groups in the order of their first runs."""
    together: dict[str, list[Summary]] = {}
    for one in summaries:
        together.setdefault(json.dumps([_plain(one.value(key)) for key in keys], default=str), []).append(one)
    counting = {key: comparable(summaries, key) for key in metrics}
    return [
        Group(
            values=tuple(members[0].value(key) for key in keys),
            states=Counter(str(one.value("state")) for one in members),
            spreads={key: spread([v for one in members if _is_number(v := of(one))]) for key, of in counting.items()},
        )
        for members in together.values()
    ]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1 and 1.0 are one value


def _is_number(value: Any) -> bool:
    """Whether it is one that can be summed: an int may be larger than every float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def for_people(groups: Sequence[Group], keys: Sequence[str], metrics: Sequence[str], sign: str = "±") -> Table:
    """A row for each group: its values, how many runs in which states, and `mean ± deviation` of each metric."""
    rows = []
    for one in groups:
        runs = sum(one.states.values())
        states = ", ".join(f"{count} {state}" for state, count in one.states.most_common())
        values = [Cell(value, text_of(value, digits=6)) for value in one.values]
        spreads = [_cell(one.spreads[key], runs, sign) for key in metrics]
        rows.append([*values, Cell(runs, str(runs)), Cell(states, states), *spreads])
    return Table([*keys, "runs", "states", *metrics], rows)


def _cell(found: Spread | None, runs: int, sign: str) -> Cell:
    if found is None:
        return Cell(None, text_of(None))
    text = number_text(found.mean)
    if found.deviation is not None:
        text += f" {sign} {found.deviation:.2g}"
    return Cell(found.mean, text if found.count == runs else f"{text} ({found.count} of {runs})")


def for_programs(groups: Sequence[Group], keys: Sequence[str], metrics: Sequence[str]) -> Table:
    """The same with a column for each number: `KEY.mean`, `KEY.sd` and `KEY.n`."""
    names = [f"{key}.{part}" for key in metrics for part in ("mean", "sd", "n")]
    rows = []
    for one in groups:
        numbers: list[Any] = []
        for key in metrics:
            found = one.spreads[key]
            numbers += [None, None, 0] if found is None else [found.mean, found.deviation, found.count]
        values = [*one.values, sum(one.states.values()), *numbers]
        rows.append([Cell(value, text_of(value)) for value in values])
    return Table([*keys, "runs", *names], rows)
