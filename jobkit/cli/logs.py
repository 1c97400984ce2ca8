"""jobkit logs RUN ...: what a rank of each printed, attempt by attempt."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from jobkit.cli.arguments import add_selection, chosen_runs
from jobkit.cli.several import each, worst
from jobkit.errors import EXIT_FINISHED, InputError, SchedulerError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.run.tail import Tail
from jobkit.run.usage import show_examples
from jobkit.submission import job
from jobkit.submission.ending import exit_code, read_to_the_end
from jobkit.submission.observer import Observer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print until the run is over, requeues included; the exit code is its own",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="whose output is printed (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="print one attempt only (default: all)")
    show_examples(
        parser,
        "latest -f  the newest run, until it is over",
        "toy --rank 3 --attempt 2  one rank's output in one attempt",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print standard output to stdout and standard error to stderr; of several runs with the name before each line."""
    found = chosen_runs(arguments)
    printers = [_Printer(run, arguments.rank, arguments.attempt, is_named=len(found) > 1) for run in found]
    code = each(found, lambda run: _print_so_far(printers[found.index(run)], arguments))
    if arguments.follow and code == EXIT_FINISHED:
        with contextlib.suppress(KeyboardInterrupt):
            return _follow(printers)
    return code


def _print_so_far(printer: _Printer, arguments: argparse.Namespace) -> int:
    """Print what is there; InputError where there never will be anything."""
    found = printer.run
    attempts = [attempt.id for attempt in found.status().attempts]
    if arguments.attempt is not None and arguments.attempt not in attempts:
        raise InputError(f"--attempt {arguments.attempt}: {found.name} has {attempts or 'none yet'}")
    printer.print_new(is_last=not arguments.follow)
    if not printer.found_any and attempts and (not arguments.follow or found.status().typed):
        if not any(any(found.logs(number).glob("rank_*")) for number in attempts):
            raise InputError(
                f"{found.name} has no log: what it printed is on the terminal where it was started. jobkit.submit "
                "keeps logs: for a script, with a YAML that has `command: [python, train.py]`"
            )
        if not arguments.follow:
            raise InputError(f"--rank {arguments.rank}: no log of this rank in {found.logs(attempts[-1])}")
    return EXIT_FINISHED


def _follow(printers: Sequence[_Printer]) -> int:
    """Print what comes, until nothing more happens to any of the runs; returns the exit code of the worst."""
    under_way, codes = [(printer, Observer(printer.run)) for printer in printers], []
    while under_way:
        for printer, observer in list(under_way):
            status = None
            try:
                status = observer.look()
            except SchedulerError as error:
                log.warning(f"{error}; still following")
            printer.print_new()
            if observer.is_over and status is not None:
                under_way.remove((printer, observer))
                read_to_the_end(printer.run, status, printer.print_new)
                printer.print_new(is_last=True)
                codes.append(exit_code(status.state))
        if under_way:
            time.sleep(job.POLL_SECONDS)
    return worst(codes)


class _Printer:
    """Prints what one rank has printed, of one attempt (`only`) or of all, once."""

    def __init__(self, run: RunDir, rank: int, only: int | None, *, is_named: bool) -> None:
        self.run, self.rank, self.only = run, rank, only
        self.found_any = False
        self._before = f"[{run.name}] " if is_named else ""
        """What stands before each line where several runs are printed."""
        self._tail = Tail()
        self._announced: set[int] = set()

    def print_new(self, *, is_last: bool = False) -> None:
        """`is_last`: nothing comes after this, so that a line without its end is printed, too."""
        for attempt in self.run.status().attempts:
            if self.only in (None, attempt.id):
                self._print(attempt.id, "out", sys.stdout, is_last)
                self._print(attempt.id, "err", sys.stderr, is_last)

    def _print(self, attempt: int, stream: str, target: TextIO, is_last: bool) -> None:
        file = self.run.rank_log(attempt, self.rank, stream)
        self.found_any |= file.exists()
        # The lines of several runs come between each other: whole ones only.
        text = self._tail.read(file, whole_lines=bool(self._before) and not is_last)
        if not text:
            return
        if attempt not in self._announced:
            self._announced.add(attempt)
            print(f"{self._before}--- attempt {attempt}, rank {self.rank}", file=sys.stderr, flush=True)
        if self._before:
            text = "".join(f"{self._before}{line}\n" for line in text.splitlines())
        print(text, end="", file=target, flush=True)
