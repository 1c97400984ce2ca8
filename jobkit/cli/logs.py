"""jobkit logs RUN ...: what a rank printed, attempt by attempt; the job's own output where no rank ever was.

logs/<attempt>/rank_<n>.{out,err} --Tail--> stdout, stderr
"""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from jobkit.cli.arguments import absent, add_runs, chosen, worst
from jobkit.cli.wait import ended
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.tail import Tail
from jobkit.usage import show_examples, to_type

POLL_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over; its exit code")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="whose output is printed (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="of one attempt only (default: all)")
    parser.add_argument("--err", action="store_true", help="only what the rank printed to standard error")
    show_examples(
        parser,
        {"toy -f": "what rank 0 prints, until the run is over", "toy --rank 3 --attempt 2": "one rank, one attempt"},
    )


def run(arguments: argparse.Namespace) -> int:
    """Print standard output to stdout and standard error to stderr; of several runs with the name before each line."""
    runs, codes = chosen(arguments), absent(arguments)
    printers = {run.path: _Printer(run, arguments, is_named=len(runs) > 1) for run in runs}
    if not arguments.follow:
        for printer in printers.values():
            printer.print_new(read_status(printer.run), to_the_end=True)
            printer.refuse_silence()
        return EXIT_FINISHED
    for view in ended(runs, POLL_SECONDS, on_look=lambda run, status: printers[run.path].print_new(status)):
        printers[view.run.path].print_new(view.status, to_the_end=True)
        print(f"{view.run.name} is {view.state}; {to_type('status', view.run.path)}", file=sys.stderr)
        codes.append(view.exit_code)
    return worst(codes)


class _Printer:
    """Prints the new output of one rank."""

    def __init__(self, run: RunDir, arguments: argparse.Namespace, *, is_named: bool) -> None:
        self.run, self.rank, self.only = run, arguments.rank, arguments.attempt
        self._streams: dict[str, TextIO] = {"err": sys.stdout} if arguments.err else {"out": sys.stdout}
        if not arguments.err:
            self._streams["err"] = sys.stderr
        self._before = f"[{run.name}] " if is_named else ""
        self._tail = Tail()
        self._attempt: int | None = None
        """The attempt whose output was printed last."""

    def print_new(self, status: Status, *, to_the_end: bool = False) -> None:
        for attempt in status.attempts:
            for stream, target in self._streams.items() if self.only in (None, attempt.number) else ():
                lines = self._tail.read(self.run.rank_log(attempt.number, self.rank, stream), to_the_end=to_the_end)
                if lines and self._attempt != attempt.number:
                    self._attempt = attempt.number
                    print(f"{self._before}--- attempt {attempt.number}, rank {self.rank}", file=sys.stderr, flush=True)
                for line in lines:
                    print(f"{self._before}{line}", file=target)
                target.flush()

    def refuse_silence(self) -> None:
        """If the rank printed nothing: say why, or print the job's own output. Raises InputError."""
        if self._attempt is not None:
            return
        numbers = [attempt.number for attempt in read_status(self.run).attempts]
        if self.only is not None and self.only not in numbers:
            raise InputError(key="--attempt", found=self.only, allowed=f"one of {numbers}" if numbers else "none yet")
        ranks = {file.stem.removeprefix("rank_") for number in numbers for file in self.run.logs(number).glob("*.out")}
        if ranks and str(self.rank) not in ranks:
            raise InputError(key="--rank", found=self.rank, allowed=f"0 to {len(ranks) - 1}")
        if not ranks and (submitted := read_status(self.run).submitted) is not None and submitted.launcher is not None:
            hint = f"{submitted.launcher} started it"
            raise InputError("its output is where that command was typed, and not kept", key=self.run.name, hint=hint)
        if not ranks:  # its setup lines, its supervisor, srun, or an agent in its container said why
            last = numbers[-1] if numbers else 1
            agents = sorted(self.run.logs(last).glob("agent_*.log"))
            for file in (self.run.job_log, self.run.srun_log(last), *agents):
                for line in self._tail.read(file, to_the_end=True):
                    print(f"{self._before}{line}")
