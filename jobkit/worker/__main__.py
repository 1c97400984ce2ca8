"""python -m jobkit.worker EXP.yaml [key=value ...]: a rank of any YAML under torchrun, mpirun, srun or plain python.

The launcher decides how many ranks there are. The same command continues the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.config.identity import run_name
from jobkit.config.load import load
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.log import configure
from jobkit.run.rundir import RunDir
from jobkit.run.runs import runs_dir_of
from jobkit.usage import Parser, exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR")
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)  # torch's old launcher


def run(arguments: argparse.Namespace) -> int:
    """Run this rank from the beginning of the attempt to its end; returns the exit code."""
    loaded = load(arguments.experiment, arguments.overrides)
    from jobkit.loop.context import Context
    from jobkit.loop.join import take_threads
    from jobkit.worker import foreign_attempt
    from jobkit.worker.command import run_command
    from jobkit.worker.ending import recorded
    from jobkit.worker.launchers import find_launch
    from jobkit.worker.task import finish_task, load_task

    run_dir = RunDir(runs_dir_of(arguments.runs_dir) / run_name(loaded.config))
    begun = foreign_attempt.begin(loaded, run_dir, find_launch(os.environ))
    if begun is None:
        return EXIT_FINISHED
    if loaded.config.command:
        return run_command(begun)
    take_threads(loaded.config.resources.cpus_per_task)
    sys.path.insert(0, str(Path.cwd()))

    def program() -> object:
        return finish_task(Context(begun.rank, begun.joined, os.environ), load_task(loaded.config.task))

    code, end = recorded(begun.rank, program)
    if end is not None:
        begun.close(end, code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run it."""

    def command() -> int:
        parser = Parser(prog="python -m jobkit.worker", description=__doc__)
        add_arguments(parser)
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        configure("stdout")
        return run(arguments)

    return exit_code(command, interrupted=EXIT_RESUMABLE)


if __name__ == "__main__":
    sys.exit(main())
