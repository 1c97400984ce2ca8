"""Which columns the list has, and what stands in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from jobkit.cli.table import ABSENT, Cell, Table, number_text
from jobkit.run.duration import format_seconds
from jobkit.run.summary import FIXED, Summary, as_number

PLAIN = ("state", "step", "attempts", "where", "job")
"""The columns of a list of which nothing was asked."""

STANDING = ("state", "step", "eta")
"""How a run stands: columns of every other list, unless one of them is named."""

MAX_METRICS = 4
"""How many results, or metrics where there is no result, are shown that nobody has named."""


def choose_columns(summaries: Sequence[Summary], named: Sequence[str] | None, also: Iterable[str] = ()) -> list[str]:
    """The columns for some runs, after that of the run's name.

    Without `named` these are the params that differ between the runs, how they stand, and their results. `also` are
    names that the list is sorted by: nobody sees an order by what is not shown.
    """
    if named is None:
        columns = [*differing(summaries), *STANDING, *metrics(summaries), "age"]
    elif set(named) & set(STANDING):
        columns = list(named)
    else:
        columns = [*named, *STANDING]
    return [key for key in dict.fromkeys([*columns, *also]) if key != "run"]


def differing(summaries: Sequence[Summary]) -> list[str]:
    """The params, and the seed, that are not the same in all of some runs."""
    keys = dict.fromkeys(key for one in summaries for key in one.keys() if key.startswith("params."))  # noqa: SIM118
    return [key for key in [*keys, "seed"] if len({json.dumps(one.value(key)) for one in summaries}) > 1]


def metrics(summaries: Sequence[Summary]) -> list[str]:
    """The names of the first numbers in the runs' results, else in what they have logged."""
    for branch in ("result", "values"):
        found = dict.fromkeys(key for one in summaries for key in _numbers(one.facts.get(branch), branch))
        if found:
            return list(found)[:MAX_METRICS]
    return []


def _numbers(value: Any, name: str) -> list[str]:
    if isinstance(value, dict):
        return [key for key, one in value.items() if _is_number(one)]
    return [name] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    value = as_number(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def table_of(summaries: Sequence[Summary], columns: Sequence[str]) -> Table:
    """A row for each run: its name, and what it has in the columns."""
    rows = [[Cell(one.run, one.run), *(cell(one, key) for key in columns)] for one in summaries]
    return Table(["run", *columns], rows)


def title(key: str) -> str:
    """A column's name as it is shown: jobkit's own in capitals; those of params and metrics are the user's."""
    return key.upper() if key in (*FIXED, "runs", "states") and key != "seed" else key


def cell(summary: Summary, key: str) -> Cell:
    """What a run has in a column."""
    value = summary.value(key)
    match key:
        case "state" if summary.facts.get("probably"):
            return Cell(value, f"probably {summary.facts['probably']}")
        case "step":
            return Cell(value, _steps(summary))
        case "eta" if value is not None:
            return Cell(round(value, 1), format_seconds(value))
        case "age":
            return Cell(round(value, 1), age_text(value))
        case "goodput" if value is not None:
            return Cell(value, f"{value:.0%}")
    return Cell(value, text_of(value, digits=6 if key.startswith("params.") else 4))


def text_of(value: Any, digits: int = 4) -> str:
    """A value as a person reads it in a table."""
    if value is None:
        return ABSENT
    if isinstance(value, str):
        return value
    return number_text(value, digits) if _is_number(value) else json.dumps(value)


def age_text(seconds: float) -> str:
    """`5 s`, `3 min`, `2 h`, `4 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def _steps(summary: Summary) -> str:
    step, total = summary.facts.get("step"), summary.facts.get("total_steps")
    if not summary.facts.get("has_loop"):
        return ABSENT
    return f"{step}/{total}" if total else str(step)
