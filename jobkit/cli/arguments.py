"""Arguments that several verbs share: which runs are meant, and whether to go on with several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run.command_line import to_type
from jobkit.run.rundir import RunDir
from jobkit.run.runs import FoundRun, all_runs, default_runs_dir
from jobkit.run.summary import Summary

WORDS = "a name, the beginning of one, a pattern ('digits*'), `latest`, a job id, a sweep's name or a path"


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """`--runs-dir`."""
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="the folder of the runs (default: $JOBKIT_RUNS or ./runs)"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN and `--runs-dir`."""
    parser.add_argument("run_name", metavar="RUN", help=WORDS)
    add_runs_dir(parser)


def add_selection(parser: argparse.ArgumentParser, *, asks: bool = False) -> None:
    """RUN ..., `--where`, `--state` and `--runs-dir`; with `asks` also `-y`, for `confirm`."""
    parser.add_argument("run_names", nargs="*", metavar="RUN", help=f"{WORDS}; several words mean all of them together")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="'KEY OP VALUE'",
        help="only runs that meet a condition, as 'params.lr>=0.03'; of several conditions all",
    )
    parser.add_argument("--state", metavar="STATE[,STATE]", help="only runs in one of these states")
    if asks:
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask before acting on several runs")
    add_runs_dir(parser)


def time_length(text: str) -> int:
    """Seconds of an option's `30s`, `2h` or `1:30:00`. A number alone is refused: sbatch's are minutes, timeout's are
    seconds."""
    from jobkit.run.duration import parse_seconds

    try:
        if text.replace(".", "", 1).isdecimal():
            raise ValueError
        return parse_seconds(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a number with a unit: 30s, 10min, 2h, 30d"
        ) from None


def runs_dir(arguments: argparse.Namespace) -> Path:
    """The runs directory that was asked for, else the default."""
    chosen: Path = arguments.runs_dir or default_runs_dir()
    return chosen.absolute()


def chosen_run(arguments: argparse.Namespace) -> RunDir:
    """The run that RUN means; raises InputError where it means none or several."""
    from jobkit.run.choose import find_run

    return find_run(arguments.run_name, runs_dir(arguments))


def chosen_runs(arguments: argparse.Namespace) -> list[RunDir]:
    """The runs that the words and the filters mean; with filters alone those of all runs.

    InputError for a word that means none, or where nothing says which runs. Filters may leave none, which is said.
    """
    if not (arguments.run_names or is_filtered(arguments)):
        raise InputError(f"which run? {WORDS}, or --where or --state; `{to_type('list')}` shows the runs")
    found = found_runs(arguments)
    if not is_filtered(arguments):
        return [run.open() for run in found]
    from jobkit.submission.overview import look_at

    left = meeting_filters(look_at(found, with_config=bool(arguments.where)), arguments)
    if not left:
        print(f"none of {len(found)} run(s) meets {_filters(arguments)}: nothing to do", file=sys.stderr)
    return [RunDir(one.path) for one in left]


def found_runs(arguments: argparse.Namespace) -> list[FoundRun]:
    """The runs that the words mean, or all where there are none; the filters are not looked at."""
    if not arguments.run_names:
        return all_runs(runs_dir(arguments))
    from jobkit.run.choose import choose  # here: `list` alone needs no patterns

    return choose(arguments.run_names, runs_dir(arguments))


def is_filtered(arguments: argparse.Namespace) -> bool:
    """Whether `--where` or `--state` is given."""
    return bool(arguments.where or arguments.state is not None)


def meeting_filters(summaries: Sequence[Summary], arguments: argparse.Namespace) -> list[Summary]:
    """Those of some runs that meet `--where` and `--state`; InputError for what is no condition on them."""
    if not is_filtered(arguments):
        return list(summaries)
    from jobkit.run import query

    conditions = [query.parse(text) for text in arguments.where]
    states = () if arguments.state is None else query.parse_states(arguments.state)
    return query.select(summaries, conditions, states)


def _filters(arguments: argparse.Namespace) -> str:
    state = [] if arguments.state is None else [f"--state {arguments.state}"]
    return " ".join([*(f"--where {text!r}" for text in arguments.where), *state])


def confirm(runs: Sequence[RunDir], arguments: argparse.Namespace, *, also_one: bool = False) -> None:
    """Return where there is one run at most, `-y`, or somebody who says yes; else raise InputError: nothing is done.

    With `also_one` one run is asked about, too.
    """
    if len(runs) <= (0 if also_one else 1) or arguments.yes:
        return
    from jobkit.run.choose import some_names

    which = f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {some_names(runs)}"
    if not sys.stdin.isatty():
        raise InputError(f"{which}; without a terminal to ask on, -y says to go on; nothing was done")
    print(f"{which} go on? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):  # Ctrl-C or Ctrl-D: the cursor is still behind the question
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError("nothing was done")
