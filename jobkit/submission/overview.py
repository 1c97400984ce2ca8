"""Many runs as they are now: what is recorded of those that have ended, and one question about the jobs of the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jobkit.errors import SchedulerError
from jobkit.run.rundir import RunDir
from jobkit.run.runs import FoundRun
from jobkit.run.status import State, Status
from jobkit.run.summary import Summary
from jobkit.submission import observer


def look_at(runs: Sequence[FoundRun]) -> list[Summary]:
    """What runs are now, in their order; one that cannot be read is left out, with a line that says so."""
    known = {run.directory: recorded for run in runs if (recorded := _recorded(run)) is not None}
    others = [(run, status) for run in runs if run.directory not in known and (status := _read(run)) is not None]
    found = [(run.open(), status) for run, status in others]
    try:
        observed = observer.observe_all(found)
    except SchedulerError as error:  # what is told of what is on disk must not depend on a slurmctld that answers
        print(f"{error}; what follows is what the run directories say", file=sys.stderr)
        observed = [status for _, status in found]
    speeds = {run.directory: _speed(opened, status) for (run, _), (opened, status) in zip(others, found, strict=True)}
    known |= {run.directory: status.as_dict() for (run, _), status in zip(others, observed, strict=True)}
    return [
        Summary(run.name, run.directory, known[run.directory], run.changed, speeds.get(run.directory))
        for run in runs
        if run.directory in known
    ]


def _read(run: FoundRun) -> Status | None:
    """What the files of a run say; None, and a line, for one that cannot be read."""
    try:
        return run.open().status()
    except OSError as error:
        print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
        return None


def _speed(run: RunDir, status: Status) -> float | None:
    """Steps per second of a run that trains, as it reports them."""
    progress = run.progress() if status.state == State.RUNNING else None
    is_own = progress is not None and status.attempt is not None and progress.attempt == status.attempt.id
    return progress.steps_per_second if is_own and progress is not None else None


def _recorded(run: FoundRun) -> dict[str, Any] | None:
    """The status that was recorded, where it holds."""
    recorded = run.recorded_status()
    holds = recorded is not None and not (State(recorded["state"]).is_under_way or recorded["submitting"])
    return recorded if holds else None
