"""Tables of the list: cells with a value and a text, and how a table looks on a terminal, in CSV and in LaTeX."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ABSENT = "-"
"""What a table shows where a run has nothing."""

GAP = "  "

MAX_CELL = 40
"""How many characters of a cell are shown: a param may be a whole text."""


class Cell(NamedTuple):
    """A value, for programs and to sort by, and what a person reads."""

    value: Any
    text: str

    @property
    def shown(self) -> str:
        """The text as a line of a terminal takes it."""
        return shown(self.text)


def shown(text: str) -> str:
    """A text as a line of a terminal takes it."""
    safe = text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
    return safe if len(safe) <= MAX_CELL else f"{safe[: MAX_CELL - 3]}..."


def _width(text: str) -> int:
    """How many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)


@dataclass(frozen=True)
class Table:
    """Rows of cells under the names of their columns."""

    keys: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def number_text(value: float, digits: int = 4) -> str:
    """A number as it is read at a glance; whole numbers in full."""
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def as_lines(table: Table, width: int | None = None, wanted: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """The lines of a table, its names first, and the columns that `width` characters have no room for.

    Columns are left out from the right, those of `wanted` after all others; the first is shown in any case.
    """
    columns = [
        _aligned([cell.shown for cell in column], [cell.value for cell in column])
        for column in zip(*table.rows, strict=True)
    ] or [[] for _ in table.keys]
    titles = [shown(key) for key in table.keys]
    widths = [max(map(_width, [title, *texts])) for title, texts in zip(titles, columns, strict=True)]
    left = list(range(len(widths)))
    by_worth = sorted(left[1:], key=lambda at: (table.keys[at] not in wanted, at))
    while width is not None and by_worth and sum(widths[at] for at in left) + len(GAP) * (len(left) - 1) > width:
        left.remove(by_worth.pop())
    padded = [[f"{text}{' ' * (widths[at] - _width(text))}" for text in (titles[at], *columns[at])] for at in left]
    dropped = [title for at, title in enumerate(titles) if at not in left]
    return [GAP.join(row).rstrip() for row in zip(*padded, strict=True)], dropped


def _aligned(texts: Sequence[str], values: Sequence[Any]) -> list[str]:
    """The texts of a column; where its values are numbers, with the ends of their whole parts below each other."""
    numbers = [value for value in values if value is not None]
    if not numbers or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers):
        return list(texts)
    whole = [len(_WHOLE.match(text)[0]) if text != ABSENT else 1 for text in texts]  # type: ignore[index]
    most = max(whole)
    return [" " * (most - length) + text for length, text in zip(whole, texts, strict=True)]


_WHOLE = re.compile(r"[-+]?(?:[0-9]+|[a-z]+)?")
"""What stands before the point of a number: `inf` and `nan` have no more."""


def as_csv(table: Table) -> str:
    """The values of a table, exactly, with commas; what is not there is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.keys)
    writer.writerows(["" if cell.value is None else cell.value for cell in row] for row in table.rows)
    return text.getvalue().rstrip("\n")


def as_latex(table: Table) -> str:
    """A `tabular` that needs no package."""
    kinds = ["r" if _is_numeric([row[at] for row in table.rows]) else "l" for at in range(len(table.keys))]
    names = " & ".join(latex_escaped(key) for key in table.keys)
    rows = [" & ".join(latex_escaped(cell.shown) for cell in row) + r" \\" for row in table.rows]
    begin = rf"\begin{{tabular}}{{{''.join(kinds)}}}"
    return "\n".join([begin, r"\hline", rf"{names} \\", r"\hline", *rows, r"\hline", r"\end{tabular}"])


def _is_numeric(cells: Sequence[Cell]) -> bool:
    values = [cell.value for cell in cells if cell.value is not None]
    return bool(values) and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def latex_escaped(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
