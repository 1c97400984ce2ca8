"""jobkit list: the runs, the latest first; as a table of what differs between them and what they found."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from jobkit.cli import columns, groups
from jobkit.cli.arguments import add_selection, found_runs, is_filtered, meeting_filters, runs_dir
from jobkit.cli.groups import Group
from jobkit.cli.json_text import json_text
from jobkit.cli.table import Table, as_csv, as_latex, as_lines
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run.command_line import to_type
from jobkit.run.garbage import uncollected
from jobkit.run.runs import FoundRun, in_a_folder_above
from jobkit.run.summary import Summary, check_keys
from jobkit.run.usage import show_examples
from jobkit.submission.overview import look_at, statuses

_T = TypeVar("_T")

WATCH_SECONDS = 2.0
"""How often --watch looks where no number is given."""

MIN_WATCH_SECONDS = 0.5
"""More often nobody reads it, and many who watch share one file system."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument(
        "--columns",
        type=_names,
        action="extend",
        metavar="KEY,...",
        help="params.x, seed, a metric, age, eta, state, step, attempts, goodput, job, where, checkpoint, name, path "
        "(default: the params that differ, state, step, eta and the results)",
    )
    parser.add_argument("--sort", metavar="[-]KEY", help="the smallest first; with - the largest")
    parser.add_argument(
        "--group-by", type=_names, action="extend", metavar="KEY,...", help="mean and spread of runs with equal values"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="the first N only")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"show it again and again until Ctrl-C (default: every {WATCH_SECONDS:g} s)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="for programs: a list of {run, path, ...status}, or of the columns"
    )
    form.add_argument("--csv", action="store_true", help="the values, with commas")
    form.add_argument("--latex", action="store_true", help="a tabular that needs no package")
    show_examples(
        parser,
        "digits/s1 --sort -accuracy  the runs of a sweep, the best first",
        "--where 'params.lr>=0.01' --state finished  of all runs those",
        "--group-by params.lr  mean and spread of runs that differ in the rest",
    )


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected names, with commas between them")
    return list(dict.fromkeys(names))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of runs, at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds; runs stand before --watch") from None
    if not MIN_WATCH_SECONDS <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {MIN_WATCH_SECONDS:g} to 86400 seconds")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Print the runs as they are now; what has ended is as it was recorded."""
    if arguments.watch is None:
        print(_text(arguments))
        return EXIT_FINISHED
    try:
        while True:
            _redraw(_text(arguments))
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        return EXIT_FINISHED


def _redraw(text: str) -> None:
    """Replace what is on the terminal; in a pipe what comes stands below what was."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    lines = text.splitlines()
    room = shutil.get_terminal_size().lines - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} more; a higher terminal, or --limit"]
    # From the top, line by line, and then what is left below: a cleared screen would flicker.
    print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)


@uncollected()
def _text(arguments: argparse.Namespace) -> str:
    """The list as it was asked for."""
    found = found_runs(arguments)
    named = [*(arguments.columns or ()), *(arguments.group_by or ()), *_sorted_by(arguments)]
    wants_statuses = arguments.json and not (arguments.columns or arguments.group_by)
    if wants_statuses and not (named or is_filtered(arguments)):
        return _statuses(found[: arguments.limit])
    is_plain = not (arguments.run_names or named or is_filtered(arguments))
    summaries = look_at(found, with_config=not is_plain)
    shown = _chosen(summaries, arguments)
    if wants_statuses:
        by_directory = {run.directory: run for run in found}
        return _statuses([by_directory[one.path] for one in shown])
    if shown or arguments.json or arguments.csv:
        return _rendered(_table(shown, arguments, is_plain), arguments, is_plain)
    if summaries:
        return f"none of {len(summaries)} run(s) meets the conditions"
    hint = in_a_folder_above(runs_dir(arguments)) or f"; {to_type('submit', 'EXP.yaml')} makes one"
    return f"no runs in {runs_dir(arguments)}{hint}"


def _chosen(summaries: Sequence[Summary], arguments: argparse.Namespace) -> list[Summary]:
    """Those of all runs that are shown, in their order; InputError for a name that none of them has anything of."""
    for option, keys in (
        ("--columns", arguments.columns),
        ("--group-by", arguments.group_by),
        ("--sort", _sorted_by(arguments)),
    ):
        check_keys(keys or (), option, summaries)
    shown = meeting_filters(summaries, arguments)
    for key in _sorted_by(arguments):
        shown = sort(shown, key, largest_first=arguments.sort.startswith("-"))
    return shown if arguments.group_by else shown[: arguments.limit]


def _sorted_by(arguments: argparse.Namespace) -> list[str]:
    """The name that the list is sorted by, if it is."""
    if arguments.sort is None:
        return []
    if not (key := str(arguments.sort).removeprefix("-")):
        raise InputError(f"--sort {arguments.sort!r}: expected the name of a column, with - for the largest first")
    return [key]


def _table(shown: Sequence[Summary], arguments: argparse.Namespace, is_plain: bool) -> Table:
    """The columns and rows that were asked for."""
    by, keys = _sorted_by(arguments), arguments.group_by
    if not keys:
        chosen = columns.PLAIN if is_plain else columns.choose_columns(shown, arguments.columns, by)
        return columns.table_of(shown, chosen)
    metrics = [key for key in dict.fromkeys([*(arguments.columns or columns.metrics(shown)), *by]) if key not in keys]
    grouped = _sorted_groups(groups.group(shown, keys, metrics), arguments)[: arguments.limit]
    if arguments.json or arguments.csv:
        return groups.for_programs(grouped, keys, metrics)
    return groups.for_people(grouped, keys, metrics, _plus_minus())


def _sorted_groups(found: Sequence[Group], arguments: argparse.Namespace) -> list[Group]:
    """By the values that the runs of each have in common, or by the mean of what the list is sorted by."""
    by = _sorted_by(arguments)
    if not by:
        return sorted(found, key=lambda one: [_order(value) or _LAST for value in one.values])
    if by[0] in arguments.group_by:
        return list(found)  # their runs have been sorted
    means = [(None if (spread := one.spreads[by[0]]) is None else spread.mean, one) for one in found]
    return _by_value(means, largest_first=arguments.sort.startswith("-"))


def _plus_minus() -> str:
    try:
        "±".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "+-"
    return "±"


def _rendered(table: Table, arguments: argparse.Namespace, is_plain: bool) -> str:
    if arguments.json:
        rows = [[cell.value for cell in row] for row in table.rows]
        return json_text([dict(zip(table.keys, row, strict=True)) for row in rows])
    if arguments.csv:
        return as_csv(table)
    if arguments.latex:
        return as_latex(table)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not is_plain else None
    wanted = [columns.title(key) for key in _wanted(arguments)]
    lines, dropped = as_lines(Table([columns.title(key) for key in table.keys], table.rows), width, wanted)
    if dropped:
        print(f"no room for {', '.join(dropped)}: a wider terminal, or --columns", file=sys.stderr)
    return "\n".join(lines)


def _wanted(arguments: argparse.Namespace) -> list[str]:
    """The names of the columns that were asked for by any option."""
    from jobkit.run import query

    conditions = [query.parse(text).key for text in arguments.where]
    state = ["state"] if arguments.state is not None else []
    chosen = [*(arguments.columns or ()), *(arguments.group_by or ())]
    return [*chosen, *_sorted_by(arguments), *conditions, *state]


def _statuses(runs: Sequence[FoundRun]) -> str:
    """The whole statuses of some runs, for programs."""
    found = [{"run": run.name, "path": run.directory, **status} for run, status in statuses(runs)]
    return json_text(found)


def sort(summaries: Sequence[Summary], key: str, *, largest_first: bool) -> list[Summary]:
    """By a value: numbers before texts; what has none, or nan, at the end in both directions."""
    return _by_value([(one.value(key), one) for one in summaries], largest_first=largest_first)


def _by_value(valued: Sequence[tuple[Any, _T]], *, largest_first: bool) -> list[_T]:
    """Numbers, then texts, and at the end what has a value of None, or nan, in both directions."""
    orders = [(_order(value), one) for value, one in valued]
    known = [(order, one) for order, one in orders if order is not None]
    known.sort(key=lambda pair: pair[0][1:], reverse=largest_first)
    known.sort(key=lambda pair: pair[0][0])  # a text is neither above nor below a number
    return [*(one for _, one in known), *(one for order, one in orders if order is None)]


_LAST = (2, 0, "")
"""Behind all that `_order` gives."""


def _order(value: Any) -> tuple[int, int | float, str] | None:
    if isinstance(value, (int, float)):
        return None if value != value else (0, value, "")
    if value is None:
        return None
    return 1, 0.0, value if isinstance(value, str) else json.dumps(value)
