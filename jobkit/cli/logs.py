"""jobkit logs RUN: what a rank printed, attempt by attempt."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TextIO

from jobkit.cli.arguments import add_run, chosen_run
from jobkit.errors import EXIT_FINISHED, InputError, SchedulerError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.run.tail import Tail
from jobkit.submission import job
from jobkit.submission.observer import Observer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print until the run is over, requeues included")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="whose output is printed (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="print one attempt only (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print standard output to stdout and standard error to stderr."""
    found = chosen_run(arguments)
    attempts = [attempt.id for attempt in found.status().attempts]
    if arguments.attempt is not None and arguments.attempt not in attempts:
        raise InputError(f"--attempt {arguments.attempt}: {found.name} has {attempts or 'none yet'}")
    printer = _Printer(found, arguments.rank, arguments.attempt)
    printer.print_new()
    if not printer.found_any and attempts and (not arguments.follow or found.status().typed):
        if not any(any(found.logs(number).glob("rank_*")) for number in attempts):
            raise InputError(
                f"{found.name} has no log: what it printed is on the terminal where it was started. jobkit.submit "
                "keeps logs: for a script, with a YAML that has `command: [python, train.py]`"
            )
        if not arguments.follow:
            raise InputError(f"--rank {arguments.rank}: no log of this rank in {found.logs(attempts[-1])}")
    if not arguments.follow:
        return EXIT_FINISHED
    observer = Observer(found)
    with contextlib.suppress(KeyboardInterrupt):
        while not observer.is_over:
            try:
                observer.look()
            except SchedulerError as error:
                log.warning(f"{error}; still following")
            printer.print_new()
            time.sleep(job.POLL_SECONDS)
        printer.print_new()
    return EXIT_FINISHED


class _Printer:
    """Prints what one rank has printed, of one attempt (`only`) or of all, once."""

    def __init__(self, run: RunDir, rank: int, only: int | None) -> None:
        self.run, self.rank, self.only = run, rank, only
        self.found_any = False
        self._tail = Tail()
        self._announced: set[int] = set()

    def print_new(self) -> None:
        for attempt in self.run.status().attempts:
            if self.only in (None, attempt.id):
                self._print(attempt.id, "out", sys.stdout)
                self._print(attempt.id, "err", sys.stderr)

    def _print(self, attempt: int, stream: str, target: TextIO) -> None:
        file = self.run.rank_log(attempt, self.rank, stream)
        self.found_any |= file.exists()
        text = self._tail.read(file)
        if not text:
            return
        if attempt not in self._announced:
            self._announced.add(attempt)
            print(f"--- attempt {attempt}, rank {self.rank}", file=sys.stderr, flush=True)
        print(text, end="", file=target, flush=True)
