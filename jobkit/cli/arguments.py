"""Arguments that several verbs share: which runs are meant, and whether to go on with several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jobkit.errors import EXIT_RESUMABLE, InputError, JobkitError
from jobkit.errors import worst as worst
from jobkit.run.rundir import RunDir
from jobkit.run.runs import WORDS, absent_runs, find, joined, runs_dir_of
from jobkit.run.view import View
from jobkit.usage import to_type


def add_runs(parser: argparse.ArgumentParser, *, asks: bool = False) -> None:
    """Add RUN ... and --runs-dir, and with `asks` also -y, for `confirm`."""
    parser.add_argument("names", nargs="+", metavar="RUN", help=WORDS)
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    if asks:
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask before acting on several runs")


def chosen(arguments: argparse.Namespace) -> list[RunDir]:
    """Return the runs that the words mean. Raises NoSuchRun for a word that means none."""
    return find(arguments.names, runs_dir_of(arguments.runs_dir))


def absent(arguments: argparse.Namespace) -> list[int]:
    """Say which runs of the sweeps among the words have not begun; return their exit code, if there are any."""
    runs_dir = runs_dir_of(arguments.runs_dir)
    names = [name for word in arguments.names for name in absent_runs(word, runs_dir)]
    if names:
        line = f"{len(names)} run(s) have not begun: {joined(names)}; the command that submits the sweep starts them"
        print(line, file=sys.stderr)
    return [EXIT_RESUMABLE] if names else []


def confirmed(arguments: argparse.Namespace) -> list[RunDir]:
    """Return the runs that the words mean, as `confirm` does."""
    return confirm(chosen(arguments), yes=arguments.yes)


def confirm(runs: list[RunDir], *, yes: bool) -> list[RunDir]:
    """Return the runs, once a person has agreed to act on several. Raises InputError for a no."""
    if len(runs) == 1 or yes:
        return runs
    which = f"{len(runs)} runs: {joined([run.name for run in runs])}"
    if not sys.stdin.isatty():
        raise InputError(f"{which}; nothing was done", hint="without a terminal to ask on, -y says to go on")
    print(f"{which}: go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was done")
    return runs


def way_out(now: View) -> str:
    """Return the command that comes first where a run is under way and has to be changed."""
    if now.answered:
        return f"first: {to_type('cancel', now.run.path)}"
    return f"where that is gone for good, first: {to_type('cancel', now.run.path, '--no-grace')}"


def for_each(runs: Sequence[RunDir], act: Callable[[RunDir], int]) -> int:
    """Act on each run and return the worst exit code; an error of one run keeps no other from its turn."""
    codes = []
    for run in runs:
        try:
            codes.append(act(run))
        except JobkitError as error:
            if len(runs) == 1:
                raise
            print(f"error: {run.name}: {error}", file=sys.stderr)
            codes.append(error.exit_code)
    return worst(codes)
