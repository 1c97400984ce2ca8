"""jobkit list: every run, the latest first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.run.rundir import RunDir, all_runs
from jobkit.run.status import Status
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of {run, ...status}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    found = _observed([(run, run.status()) for run in all_runs(runs_dir(arguments))])
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


def _observed(found: Sequence[tuple[RunDir, Status]]) -> list[tuple[RunDir, Status]]:
    try:
        statuses = job.observe_all(found)
    except SchedulerError as error:  # the list of what is on disk must not depend on a slurmctld that answers
        print(f"{error}; what follows is what the run directories say", file=sys.stderr)
        return list(found)
    return [(run, status) for (run, _), status in zip(found, statuses, strict=True)]


def _row(run: RunDir, status: Status) -> tuple[str, ...]:
    step = f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)
    state = f"probably {status.probably}" if status.probably else str(status.state)
    return run.name, state, step, str(len(status.attempts)), status.cluster or "-", status.job_id or "-"
