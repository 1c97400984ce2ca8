"""The table of `jobkit list`: which columns it has, and how a person reads their cells.

    Row (rows.py) --choose--> keys --as_lines--> lines of a terminal

No markup is read in any text: a metric may be called `acc[/top5]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from jobkit.cli.rows import FACTS, Row
from jobkit.duration import format_seconds

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
    of_rows = [row.params for row in rows]
    keys = dict.fromkeys(chain(*of_rows[:1], ["seed"], *of_rows))
    return [key for key in keys if any(row.values.get(key) != rows[0].values.get(key) for row in rows)][:MAX_PARAMS]


def _metrics(rows: Sequence[Row]) -> list[str]:
    """The names of the first numbers in the rows' results, else in what they logged last."""
    for source in ([row.results for row in rows], [row.logged for row in rows]):
        names = dict.fromkeys(
            name for values in source for name, value in values.items() if type(value) in (int, float)
        )
        if names:
            return list(names)[:MAX_METRICS]
    return []


def as_lines(rows: Sequence[Row], keys: Sequence[str], width: int | None = None) -> tuple[list[str], list[str]]:
    """Return a table's lines, and the keys of the columns at its right that `width` characters have no room for."""
    columns = [[_title(key), *_cells(rows, key)] for key in keys]
    widths = [max(map(len, column)) for column in columns]
    shown = len(columns)
    while width is not None and shown > 1 and sum(widths[:shown]) + len(GAP) * (shown - 1) > width:
        shown -= 1
    padded = GAP.join(f"{{:<{width}}}" for width in widths[:shown]).format
    return [padded(*line).rstrip() for line in zip(*columns[:shown], strict=True)], list(keys[shown:])


def _title(key: str) -> str:
    """A column's title: jobkit's own in capitals; names of params and metrics are the user's."""
    return key.upper() if key in FACTS and key != "seed" else key


def _cells(rows: Sequence[Row], key: str) -> list[str]:
    """The texts of a column: as much of each as a cell has room for, and no signs that steer a terminal."""
    if key == "step":
        texts = [_steps(row.values) for row in rows]
    else:
        form = _FORMS.get(key, _param if key.startswith("params.") else _value)
        values = [row.values.get(key) for row in rows]
        texts = [ABSENT if value is None else value if type(value) is str else form(value) for value in values]
    return [text if len(text) <= MAX_CELL and text.isprintable() else _safe(text) for text in texts]


def _safe(text: str) -> str:
    safe = "".join(sign if sign.isprintable() else "?" for sign in text)
    return safe if len(safe) <= MAX_CELL else f"{safe[: MAX_CELL - 3]}..."


def _steps(values: Mapping[str, Any]) -> str:
    step, total = values.get("step"), values.get("total_steps")
    return ABSENT if step is None else f"{step}/{total}" if total else str(step)


def _age(seconds: float) -> str:
    unit, length = next((unit for unit in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= unit[1]), ("s", 1))
    return f"{int(seconds // length)} {unit}"


def _param(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _value(value)


def _value(value: Any) -> str:
    return str(value) if type(value) is int else f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


_FORMS: dict[str, Callable[[Any], str]] = {"eta": format_seconds, "age": _age}
