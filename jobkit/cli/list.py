"""jobkit list: every run, the latest first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.run.command_line import to_type
from jobkit.run.rundir import RunDir
from jobkit.run.runs import FoundRun, all_runs
from jobkit.run.status import State, Status
from jobkit.submission import observer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of {run, ...status}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them as they are now; what has ended is as it was recorded."""
    runs = all_runs(runs_dir(arguments))
    statuses = _statuses(runs)
    shown = [(run.name, statuses[run.name]) for run in runs if run.name in statuses]
    if arguments.json:
        print(json.dumps([{"run": name, **status} for name, status in shown], indent=1))
        return EXIT_FINISHED
    if not shown:
        print(f"no runs in {runs_dir(arguments)}; {to_type('submit', 'EXP.yaml')} makes one")
        return EXIT_FINISHED
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "ATTEMPTS", "WHERE", "JOB")]
    rows += [_row(name, status) for name, status in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    print("\n".join(line(*row).rstrip() for row in rows))
    return EXIT_FINISHED


def _statuses(runs: Sequence[FoundRun]) -> dict[str, dict[str, Any]]:
    """Plain values by run; the scheduler is asked, once, where more may happen to runs by themselves."""
    statuses = {run.name: recorded for run in runs if (recorded := _recorded(run)) is not None}
    found = [one for run in runs if run.name not in statuses and (one := _read(run.open())) is not None]
    try:
        observed = observer.observe_all(found)
    except SchedulerError as error:  # the list of what is on disk must not depend on a slurmctld that answers
        print(f"{error}; what follows is what the run directories say", file=sys.stderr)
        observed = [status for _, status in found]
    return statuses | {run.name: status.as_dict() for (run, _), status in zip(found, observed, strict=True)}


def _read(run: RunDir) -> tuple[RunDir, Status] | None:
    """A run and what its files say; None, and a line, for one that cannot be read."""
    try:
        return run, run.status()
    except OSError as error:
        print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
        return None


def _recorded(run: FoundRun) -> dict[str, Any] | None:
    """The status that was recorded, where it holds."""
    recorded = run.recorded_status()
    holds = recorded is not None and not (State(recorded["state"]).is_under_way or recorded["submitting"])
    return recorded if holds else None


def _row(name: str, status: dict[str, Any]) -> tuple[str, ...]:
    step, total = status["step"], status["total_steps"]
    has_loop = total is not None or step or any(one["resumed"] is not None for one in status["attempts"])
    state = f"probably {status['probably']}" if status.get("probably") else str(status["state"])
    where = (status["cluster"] or "-", status["job_id"] or "-")
    steps = (f"{step}/{total}" if total else str(step)) if has_loop else "-"
    return name, state, steps, str(len(status["attempts"])), *where
