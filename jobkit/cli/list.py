"""jobkit list: every run, the latest first."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.run.rundir import FoundRun, RunDir, all_runs
from jobkit.run.status import State, Status
from jobkit.submission import job

ENDED = (State.FINISHED, State.FAILED, State.CANCELLED)
"""Nothing more happens to such a run by itself: what was recorded of it holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of {run, ...status}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    runs = all_runs(runs_dir(arguments))
    if arguments.json:
        print(json.dumps([{"run": run.name, **_plain_status(run)} for run in runs], indent=1))
        return EXIT_FINISHED
    if not runs:
        print(f"no runs in {runs_dir(arguments)}; python -m jobkit.submit EXP.yaml makes one")
        return EXIT_FINISHED
    rows = [("RUN", "STATE", "STEP", "ATTEMPTS", "WHERE", "JOB")] + [_row(run.name, _plain_status(run)) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    print("\n".join(line(*row).rstrip() for row in rows))
    return EXIT_FINISHED


def _plain_status(found: FoundRun) -> dict[str, Any]:
    """The status as plain values; the scheduler is asked only where more may happen to a run by itself."""
    recorded = found.recorded_status()
    if recorded is not None and recorded["state"] in ENDED and not recorded["submitting"]:
        return recorded
    return _status(found.open()).as_dict()


def _status(run: RunDir) -> Status:
    try:
        return job.update_status(run)
    except SchedulerError:
        return run.status()  # the list of what is on disk must not depend on a slurmctld that answers


def _row(name: str, status: dict[str, Any]) -> tuple[str, ...]:
    step, total = status["step"], status["total_steps"]
    where = (status["cluster"] or "-", status["job_id"] or "-")
    return name, status["state"], f"{step}/{total}" if total else str(step), str(len(status["attempts"])), *where
