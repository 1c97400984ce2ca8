"""jobkit logs RUN: what a rank printed, attempt by attempt."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from jobkit.cli.arguments import add_run, chosen_run
from jobkit.errors import EXIT_FINISHED, InputError, SchedulerError
from jobkit.run.rundir import RunDir
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, `-f`, `--rank`, `--attempt` and `--runs-dir`."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over, requeues included")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="whose output (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="one attempt only (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print standard output to stdout and standard error to stderr."""
    found = chosen_run(arguments)
    attempts = [attempt.id for attempt in found.status().attempts]
    if arguments.attempt is not None and arguments.attempt not in attempts:
        raise InputError(f"--attempt {arguments.attempt}: {found.name} has {attempts or 'none yet'}")
    reader = _Reader(found, arguments.rank, arguments.attempt)
    reader.print_new()
    if not arguments.follow:
        if not reader.found_any and attempts:
            if not any(found.logs(number).glob("rank_*") for number in attempts):
                raise InputError(f"{found.name} was started by a launcher of its own, on whose terminal its output is")
            raise InputError(f"--rank {arguments.rank}: no log of this rank in {found.logs(attempts[-1])}")
        return EXIT_FINISHED
    with contextlib.suppress(KeyboardInterrupt):
        while _goes_on(found):
            for _ in range(10):  # the scheduler is asked less often than the disk
                reader.print_new()
                time.sleep(0.3)
        reader.print_new()
    return EXIT_FINISHED


def _goes_on(run: RunDir) -> bool:
    try:
        return job.is_active(run, job.current_status(run))
    except SchedulerError as error:
        print(f"jobkit: {error}; still following", file=sys.stderr)
        return True


class _Reader:
    """Remembers how far each file was printed."""

    def __init__(self, run: RunDir, rank: int, only: int | None) -> None:
        self.run, self.rank, self.only = run, rank, only
        self.found_any = False
        self._positions: dict[Path, int] = {}
        self._announced: set[int] = set()

    def print_new(self) -> None:
        for attempt in self.run.status().attempts:
            if self.only in (None, attempt.id):
                for stream, target in (("out", sys.stdout), ("err", sys.stderr)):
                    self._print_file(attempt.id, self.run.rank_log(attempt.id, self.rank, stream), target)

    def _print_file(self, attempt: int, file: Path, target: object) -> None:
        if not file.exists():
            return
        self.found_any = True
        with file.open(errors="replace") as source:
            source.seek(self._positions.get(file, 0))
            text = source.read()
            self._positions[file] = source.tell()
        if text:
            if attempt not in self._announced:
                self._announced.add(attempt)
                print(f"--- attempt {attempt}, rank {self.rank}", file=sys.stderr, flush=True)
            print(text, end="", file=target, flush=True)  # type: ignore[call-overload]
