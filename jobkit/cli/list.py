"""jobkit list: the runs, the latest first, as a table: how they stand, what differs, their results."""

from __future__ import annotations

import argparse
import csv
import gc
import io
import shutil
import sys
import time
from pathlib import Path

from jobkit.cli import table
from jobkit.cli.rows import FACTS, check_keys, read_rows
from jobkit.cli.where import ordered, parse
from jobkit.errors import EXIT_FINISHED
from jobkit.run.files import json_text
from jobkit.run.runs import WORDS, find, runs_dir_of, runs_in
from jobkit.usage import program, show_examples

WATCH_SECONDS = 2.0
LEAST_SECONDS = 0.5
"""More often nobody reads it, and many who watch share one file system."""


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
        return EXIT_FINISHED
    try:
        while True:
            _redraw(_text(arguments))
            time.sleep(max(arguments.watch, LEAST_SECONDS))
    except KeyboardInterrupt:
        return EXIT_FINISHED


def _redraw(text: str) -> None:
    """Replace what is on the terminal; in a pipe one list follows the other."""
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
    all_rows = read_rows(find(arguments.names, runs_dir) if arguments.names else runs_in(runs_dir))
    named = [key.strip() for key in (arguments.columns or "").split(",") if key.strip()]
    conditions = [parse(text) for text in arguments.where]
    conditional, by = [condition.key for condition in conditions], (arguments.sort or "").removeprefix("-")
    for option, checked in (("--columns", named), ("--where", conditional), ("--sort", [by] if by else [])):
        check_keys(checked, option, all_rows)
    shown = [row for row in all_rows if all(item.is_met_by(row.values.get(item.key)) for item in conditions)]
    if by:
        shown = ordered(shown, lambda row: row.values.get(by), largest_first=arguments.sort.startswith("-"))
    if arguments.json and not named:
        return json_text([row.as_json() for row in shown])
    keys = [*dict.fromkeys(["run", *(named or table.choose(shown)), *conditional, *([by] if by else [])])]
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
    lines, dropped = table.as_lines(shown, keys, width)
    if dropped:
        print(f"no room for {', '.join(dropped)}: a wider terminal, or --columns", file=sys.stderr)
    return "\n".join(lines)
