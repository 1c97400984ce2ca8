"""Plain tables: cells with a value and a text, as lines of a terminal or as CSV.

    as_lines(["RUN", "LOSS"], [[Cell("toy", "toy"), Cell(0.25, "0.25")]], width=80)

No markup is read in any text: a metric may be called `acc[/top5]`.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

ABSENT = "-"
GAP = "  "
MAX_CELL = 40
"""How many characters of a cell are shown: a param may be a whole text."""


class Cell(NamedTuple):
    """A value for programs, and a text for a person."""

    value: Any
    text: str


def as_lines(
    titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int | None = None, wanted: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return a table's lines, and the titles of columns that `width` characters have no room for.

    Columns are left out from the right, those of `wanted` after all others, the first never.
    """
    columns = [[_printable(title), *(_printable(row[at].text) for row in rows)] for at, title in enumerate(titles)]
    widths = [max(map(_width, column)) for column in columns]
    shown = list(range(len(columns)))
    by_worth = sorted(shown[1:], key=lambda at: (titles[at] not in wanted, at))
    while width is not None and by_worth and sum(widths[at] + len(GAP) for at in shown) - len(GAP) > width:
        shown.remove(by_worth.pop())
    padded = [[text + " " * (widths[at] - _width(text)) for text in columns[at]] for at in shown]
    lines = [GAP.join(row).rstrip() for row in zip(*padded, strict=True)]
    return lines, [title for at, title in enumerate(titles) if at not in shown]


def as_csv(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return the values with commas; an absent value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(["" if cell.value is None else cell.value for cell in row] for row in rows)
    return text.getvalue().rstrip("\n")


def _printable(text: str) -> str:
    safe = text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
    return safe if len(safe) <= MAX_CELL else f"{safe[: MAX_CELL - 3]}..."


def _width(text: str) -> int:
    """How many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)
