"""jobkit wait RUN ...: return when the runs are over, with the exit code of the worst."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence

from jobkit.cli.arguments import absent, add_runs, chosen, worst
from jobkit.disk import Looks
from jobkit.duration import parse_seconds
from jobkit.errors import NoSuchRun
from jobkit.log import log
from jobkit.run.journal import known_status
from jobkit.run.rundir import RunDir
from jobkit.run.runs import absent_runs, runs_dir_of, sweep_file, sweep_lock
from jobkit.run.status import Status
from jobkit.run.view import View, look
from jobkit.usage import show_examples

EXIT_TIMED_OUT = 124
"""As timeout(1): some runs went on."""

ASK_SECONDS = 10.0
"""Between two questions to Slurm; all users share its controller. The runs' own files say most of it sooner."""

LOOK_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help=f"seconds, 10min, 2h ...; then exit code {EXIT_TIMED_OUT}"
    )
    show_examples(parser, {"'digits*' --timeout 2h": "exit code 1: one failed, 75: one can be continued, 0: finished"})


def _seconds(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else parse_seconds(text)  # sbatch counts a bare number in minutes
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {error}") from None


def run(arguments: argparse.Namespace) -> int:
    """Wait, and print a line for each run as it ends. Ctrl-C ends the waiting alone."""
    until = math.inf if arguments.timeout is None else time.monotonic() + arguments.timeout
    looks = Looks()
    while (runs := looks.at(_begun, arguments)) is None:
        if time.monotonic() >= until:
            return EXIT_TIMED_OUT
        time.sleep(LOOK_SECONDS)
    codes = absent(arguments)
    for view in ended(runs, LOOK_SECONDS, until=until):
        runs.remove(view.run)
        codes.append(view.exit_code)
        print(f"{view.run.name}: {view.state}{f': {view.words}' if view.words else ''}", flush=True)
    return EXIT_TIMED_OUT if runs else worst(codes)


def _begun(arguments: argparse.Namespace) -> list[RunDir] | None:
    """Return the runs that the words mean; None while the loop of a sweep makes them here, one by one."""
    runs_dir = runs_dir_of(arguments.runs_dir)
    files = [sweep_file(word, runs_dir) for word in arguments.names]
    if any(file is not None and sweep_lock(file).is_held() for file in files):
        return None
    try:
        return chosen(arguments)
    except NoSuchRun:
        if None in files or not any(absent_runs(word, runs_dir) for word in arguments.names):
            raise
        return []  # none of a sweep has begun


def ended(
    runs: Sequence[RunDir],
    pause: float,
    *,
    until: float = math.inf,
    on_look: Callable[[RunDir, Status], None] = lambda run, status: None,
) -> Iterator[View]:
    """Yield the view of each run as soon as nothing more happens to it by itself.

    The files of the runs are read after each pause; the scheduler is asked every ASK_SECONDS, once for all runs.
    `until` is by the monotonic clock.
    """
    waiting, ask_at, looks, unheard = list(runs), 0.0, Looks(), set()
    while waiting:
        is_due = time.monotonic() >= ask_at
        if is_due:
            ask_at = time.monotonic() + ASK_SECONDS
        read = [(run, status) for run in waiting if (status := looks.at(known_status, run)) is not None]
        for run, status in read:
            on_look(run, status)
        for view in looks.at(look, [(run, status) for run, status in read if is_due or status.is_over]) or ():
            if view.is_over:
                waiting.remove(view.run)
                yield view
            elif not view.answered and view.run not in unheard:
                unheard.add(view.run)
                log.warning("%s is %s: %s", view.run.name, view.state, view.words)
        if time.monotonic() >= until:
            return
        if waiting:
            time.sleep(pause)
