"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobkit.run.rundir import RunDir
from jobkit.run.runs import default_runs_dir, find_run


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """`--runs-dir`."""
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="the folder of the runs (default: $JOBKIT_RUNS or ./runs)"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN and `--runs-dir`."""
    parser.add_argument("run_name", metavar="RUN", help="name of a run, beginning of one, path or job id")
    add_runs_dir(parser)


def runs_dir(arguments: argparse.Namespace) -> Path:
    """The runs directory that was asked for, else the default."""
    chosen: Path = arguments.runs_dir or default_runs_dir()
    return chosen.absolute()


def chosen_run(arguments: argparse.Namespace) -> RunDir:
    """The run that RUN means; raises InputError where it means none or several."""
    return find_run(arguments.run_name, runs_dir(arguments))
