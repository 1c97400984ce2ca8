"""jobkit list: every run, the latest first."""

from __future__ import annotations

import argparse
import json
import sys

from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.run.rundir import RunDir, all_runs
from jobkit.run.status import Status
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of {run, ...status}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    found = [(run, status) for run in all_runs(runs_dir(arguments)) if (status := _status(run)) is not None]
    if arguments.json:
        print(json.dumps([{"run": run.name, **status.as_dict()} for run, status in found], indent=1))
        return EXIT_FINISHED
    if not found:
        print(f"no runs in {runs_dir(arguments)}; python -m jobkit.submit EXP.yaml makes one")
        return EXIT_FINISHED
    rows = [("RUN", "STATE", "STEP", "ATTEMPTS", "WHERE", "JOB")] + [_row(run, status) for run, status in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_FINISHED


def _status(run: RunDir) -> Status | None:
    """How a run stands; None, and a line, for one that this user may not read."""
    try:
        try:
            return job.update_status(run)
        except SchedulerError:
            return run.status()  # the list of what is on disk must not depend on a slurmctld that answers
    except PermissionError as error:
        print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
        return None


def _row(run: RunDir, status: Status) -> tuple[str, ...]:
    step = f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)
    return run.name, status.state, step, str(len(status.attempts)), status.cluster or "-", status.job_id or "-"
