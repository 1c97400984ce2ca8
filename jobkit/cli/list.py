"""jobkit list: the runs, the latest first, as a table: how they stand, what differs, their results.

    View (run/view.py: its state) --> Row (rows.py) --choose--> keys --as_lines--> lines of a terminal

No markup is read in any text: a metric may be called `acc[/top5]`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jobkit.cli.arguments import absent
from jobkit.cli.rows import FACTS, Row, check_keys, ordered, parse, read_rows
from jobkit.disk import Looks
from jobkit.duration import format_seconds
from jobkit.errors import EXIT_FINISHED
from jobkit.run.files import json_text
from jobkit.run.runs import WORDS, find, runs_dir_of, runs_in
from jobkit.usage import program, show_examples

WATCH_SECONDS = 2.0
LEAST_SECONDS = 0.5
"""Nobody reads a list more often, and all watchers share one file system."""

ABSENT = "-"
GAP = "  "
MAX_CELL = 40
"""How many characters of a cell are shown: a param may be a whole text."""

LEAST_REASON = 24
"""The reason of an end takes the rest of a line, if it is as long as this."""

MAX_METRICS = 4
MAX_PARAMS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"{WORDS} (default: all runs)")
    parser.add_argument(
        "--where", action="append", default=[], metavar="'KEY OP VALUE'", help="only runs that meet the condition"
    )
    parser.add_argument("--sort", metavar="[-]KEY", help="the smallest first; with - the largest")
    parser.add_argument(
        "--columns", metavar="KEY,...", help="params.x, result.x, metrics, and: " + ", ".join(FACTS[:-2])
    )
    parser.add_argument(
        "--watch", nargs="?", type=float, const=WATCH_SECONDS, metavar="SECONDS", help="show it until Ctrl-C"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs: the whole statuses, or the --columns")
    form.add_argument("--csv", action="store_true", help="the values with commas")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    show_examples(
        parser,
        {
            "'digits*' --sort -accuracy": "the runs of a sweep, the best first",
            "--where 'params.lr>=0.01' --where state=failed": "of all runs those that meet both conditions",
        },
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the runs as they are now."""
    if arguments.watch is None:
        print(_text(arguments))
        absent(arguments)
        return EXIT_FINISHED
    looks = Looks()
    try:
        while True:
            if (text := looks.at(_text, arguments)) is not None:
                _redraw(text)
            time.sleep(max(arguments.watch, LEAST_SECONDS))
    except KeyboardInterrupt:
        return EXIT_FINISHED


def _redraw(text: str) -> None:
    """Replace the text on the terminal; in a pipe one list follows the other."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    shown, room = text.splitlines(), shutil.get_terminal_size().lines - 1
    if len(shown) > room:
        shown = [*shown[: room - 1], f"... and {len(shown) - room + 1} more: a higher terminal, or --where"]
    # Line by line from the top, and then what is left below: a cleared screen would flicker.
    print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J", end="", flush=True)


def _text(arguments: argparse.Namespace) -> str:
    gc.disable()  # thousands of small dicts: each collection would look at all of them again
    runs_dir = runs_dir_of(arguments.runs_dir)
    named = [key.strip() for key in (arguments.columns or "").split(",") if key.strip()]
    conditions = [parse(text) for text in arguments.where]
    conditional, by = [condition.key for condition in conditions], (arguments.sort or "").removeprefix("-")
    runs = find(arguments.names, runs_dir) if arguments.names else runs_in(runs_dir)
    all_rows = read_rows(runs, [*named, *conditional, *([by] if by else [])])
    for option, checked in (("--columns", named), ("--where", conditional), ("--sort", [by] if by else [])):
        check_keys(checked, option, all_rows)
    shown = [row for row in all_rows if all(item.is_met_by(row.values.get(item.key)) for item in conditions)]
    if by:
        shown = ordered(shown, lambda row: row.values.get(by), largest_first=arguments.sort.startswith("-"))
    if arguments.json and not named:
        return json_text([row.as_json() for row in shown])
    keys = [*dict.fromkeys(["run", *(named or choose(shown)), *conditional, *([by] if by else [])])]
    if arguments.json:
        return json_text([{key: row.values.get(key) for key in keys} for row in shown])
    if arguments.csv:
        text = io.StringIO()
        rows = ([row.values.get(key) for key in keys] for row in shown)
        csv.writer(text, lineterminator="\n").writerows([keys, *rows])
        return text.getvalue().rstrip("\n")
    if not all_rows:
        return f"no runs in {runs_dir}; `{program('submit')} EXP.yaml` makes one"
    if not shown:
        return f"none of {len(all_rows)} run(s) meets the conditions"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not named else None
    lines, dropped = as_lines(shown, keys, width)
    if dropped:
        print(f"no room for {', '.join(dropped)}: a wider terminal, or --columns", file=sys.stderr)
    return "\n".join(lines)


# The table


def choose(rows: Sequence[Row]) -> list[str]:
    """Return the usual columns: how the runs stand, the params that differ between them, and their results."""
    usual = ["state", "step", "eta", "waits", "attempts", *_differing(rows), *_metrics(rows), "where", "age", "reason"]
    return [key for key in usual if any(row.values.get(key) is not None for row in rows)]


def _differing(rows: Sequence[Row]) -> list[str]:
    """The first params, and the seed, that are not the same in all rows."""
    of_rows = [row.params for row in rows]
    keys = dict.fromkeys(chain(*of_rows[:1], ["seed"], *of_rows))
    return [key for key in keys if any(row.values.get(key) != rows[0].values.get(key) for row in rows)][:MAX_PARAMS]


def _metrics(rows: Sequence[Row]) -> list[str]:
    """The names of the first numbers in the rows' results, else in their newest logged values."""
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
    if width is not None and keys[-1] == "reason":
        widths[-1] = min(widths[-1], max(LEAST_REASON, width - sum(widths[:-1]) - len(GAP) * (shown - 1)))
        columns[-1] = [_safe(text, widths[-1]) for text in columns[-1]]
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
    max_length = sys.maxsize if key == "reason" else MAX_CELL
    return [text if len(text) <= max_length and text.isprintable() else _safe(text, max_length) for text in texts]


def _safe(text: str, max_length: int) -> str:
    safe = "".join(sign if sign.isprintable() else "?" for sign in text)
    return safe if len(safe) <= max_length else f"{safe[: max_length - 3]}..."


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
