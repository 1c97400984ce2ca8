"""The table of `jobkit list`: which columns it has, and how a person reads their cells.

    Row (rows.py) --choose--> keys --as_lines--> lines of a terminal

No markup is read in any text: a metric may be called `acc[/top5]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jobkit.cli.rows import FACTS, Row, leaves
from jobkit.run.duration import format_seconds

ABSENT = "-"
GAP = "  "
MAX_CELL = 40
"""How many characters of a cell are shown: a param may be a whole text."""

MAX_METRICS = 4
MAX_PARAMS = 8


def choose(rows: Sequence[Row]) -> list[str]:
    """Return the usual columns: how the runs stand, the params that differ between them, and their results."""
    usual = ["state", "step", "eta", "waits", "attempts", *_differing(rows), *_metrics(rows), "where", "age"]
    return [key for key in usual if any(row.values.get(key) is not None for row in rows)]


def _differing(rows: Sequence[Row]) -> list[str]:
    """The first params, and the seed, that are not the same in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row.values if key.startswith("params.") or key == "seed")
    return [key for key in keys if any(row.values.get(key) != rows[0].values.get(key) for row in rows)][:MAX_PARAMS]


def _metrics(rows: Sequence[Row]) -> list[str]:
    """The names of the first numbers in the rows' results, else in what they logged last."""
    results = [dict(leaves(row.values.get("result"), "")) for row in rows]
    for source in (results, [row.logged for row in rows]):
        names = dict.fromkeys(
            name for values in source for name, value in values.items() if type(value) in (int, float)
        )
        if names:
            return list(names)[:MAX_METRICS]
    return []


def as_lines(rows: Sequence[Row], keys: Sequence[str], width: int | None = None) -> tuple[list[str], list[str]]:
    """Return a table's lines, and the keys of the columns at its right that `width` characters have no room for."""
    columns = [[_title(key), *(_cell(row, key) for row in rows)] for key in keys]
    widths = [max(map(len, column)) for column in columns]
    shown = len(columns)
    while width is not None and shown > 1 and sum(widths[:shown]) + len(GAP) * (shown - 1) > width:
        shown -= 1
    padded = [[text.ljust(widths[at]) for text in columns[at]] for at in range(shown)]
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)], list(keys[shown:])


def _title(key: str) -> str:
    """A column's title: jobkit's own in capitals; names of params and metrics are the user's."""
    return key.upper() if key in FACTS and key != "seed" else key


def _cell(row: Row, key: str) -> str:
    text = _text(row, key, row.values.get(key))
    safe = text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
    return safe if len(safe) <= MAX_CELL else f"{safe[: MAX_CELL - 3]}..."


def _text(row: Row, key: str, value: Any) -> str:
    if value is None:
        return ABSENT
    if key == "step":
        total = row.values.get("total_steps")
        return f"{value}/{total}" if total else str(value)
    if key == "eta":
        return format_seconds(value)
    if key == "age":
        unit, length = next((unit for unit in (("d", 86400), ("h", 3600), ("min", 60)) if value >= unit[1]), ("s", 1))
        return f"{int(value // length)} {unit}"
    if isinstance(value, float):
        return f"{value:.6g}" if key.startswith("params.") else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
