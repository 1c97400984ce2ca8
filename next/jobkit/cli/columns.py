"""Which columns `jobkit list` shows, and how a person reads their cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from jobkit.cli.rows import FACTS, Row, leaves
from jobkit.cli.table import ABSENT, Cell
from jobkit.run.duration import format_seconds

MAX_METRICS = 4
MAX_PARAMS = 8


def choose(rows: Sequence[Row], named: Sequence[str] | None, also: Iterable[str] = ()) -> list[str]:
    """Return the columns behind the run's name. `also` are names of conditions and of the order, which are shown too.

    Without `named`: how the runs stand, the params that differ between them, and their results.
    """
    if named is None:
        usual = ["state", "step", "eta", "waits", "attempts", *differing(rows), *metrics(rows), "where", "age"]
        named = [key for key in usual if any(row.value(key) is not None for row in rows)]
    return [key for key in dict.fromkeys([*named, *also]) if key != "run"]


def differing(rows: Sequence[Row]) -> list[str]:
    """Return the first params, and the seed, that are not the same in all rows."""
    params = [dict(leaves(row.value("params"), "params.")) | {"seed": row.value("seed")} for row in rows]
    keys = dict.fromkeys(key for values in params for key in values)
    return [key for key in keys if any(values.get(key) != params[0].get(key) for values in params)][:MAX_PARAMS]


def metrics(rows: Sequence[Row]) -> list[str]:
    """Return the names of the first numbers in the rows' results, else in what they logged last."""
    results = [dict(leaves(row.value("result"), "")) for row in rows]
    for source in (results, [row.values for row in rows]):
        names = dict.fromkeys(name for values in source for name, value in values.items() if _is_number(value))
        if names:
            return list(names)[:MAX_METRICS]
    return []


def title(key: str) -> str:
    """Return a column's title: jobkit's own in capitals; names of params and metrics are the user's."""
    return key.upper() if key in FACTS and key != "seed" else key


def cell(row: Row, key: str) -> Cell:
    """Return what a row has in a column."""
    value = row.value(key)
    if value is None:
        return Cell(None, ABSENT)
    match key:
        case "step":
            total = row.value("total_steps")
            return Cell(value, f"{value}/{total}" if total else str(value))
        case "eta":
            return Cell(value, format_seconds(value))
        case "age":
            return Cell(value, age_text(value))
        case "goodput":
            return Cell(value, f"{value:.0%}")
    if isinstance(value, float):
        return Cell(value, f"{value:.6g}" if key.startswith("params.") else f"{value:.4g}")
    return Cell(value, value if isinstance(value, str) else json.dumps(value))


def age_text(seconds: float) -> str:
    """Return `5 s`, `3 min`, `2 h`, `4 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
