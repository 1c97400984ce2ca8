"""Many runs as they are now: what is recorded of those that have ended, and one question about the jobs of the rest."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from jobkit.errors import SchedulerError
from jobkit.run.index import facts_of_ended
from jobkit.run.rundir import RunDir
from jobkit.run.runs import FoundRun
from jobkit.run.status import State, Status
from jobkit.run.summary import Facts, Summary, facts_of
from jobkit.submission import observer


def look_at(runs: Sequence[FoundRun], *, with_config: bool = False) -> list[Summary]:
    """What runs are now, in their order; one that cannot be read is left out, with a line that says so.

    `with_config`: with the params and the seed of runs that an earlier jobkit submitted, which takes longer.
    """
    facts: dict[str, Facts] = facts_of_ended(runs, with_config=with_config)
    speeds: dict[str, float | None] = {}
    for run, status in _now(runs, facts):
        facts[run.directory] = facts_of(status.as_dict())
        speeds[run.directory] = _speed(run.open(), status)
        if with_config and status.name is None:
            facts[run.directory] |= run.recorded_config()
    return [
        Summary(run.name, run.directory, facts[run.directory], run.changed, speeds.get(run.directory))
        for run in runs
        if run.directory in facts
    ]


def look_again(one: Summary) -> Summary:
    """What a run's files say now; nobody is asked: where nothing was journalled since, the scheduler's word stays."""
    run = RunDir(one.path)
    try:
        status, changed = run.status(), run.journal.path.stat().st_mtime
    except OSError:  # removed, or its disk is away for a moment
        return one
    facts = facts_of(status.as_dict())
    if changed == one.changed:
        facts |= {key: one.facts.get(key) for key in ("state", "probably")}
    return Summary(one.run, one.path, facts, changed, _speed(run, status))


def statuses(runs: Sequence[FoundRun]) -> list[tuple[FoundRun, dict[str, Any]]]:
    """The whole status of each run in plain values, as `look_at`."""
    whole = {run.directory: status for run in runs if (status := run.final_status()) is not None}
    whole |= {run.directory: status.as_dict() for run, status in _now(runs, whole)}
    return [(run, whole[run.directory]) for run in runs if run.directory in whole]


def _now(runs: Sequence[FoundRun], known: Collection[str]) -> list[tuple[FoundRun, Status]]:
    """Of those runs of which nothing is known what they are now; the scheduler is asked once for all of them."""
    others = [run for run in runs if run.directory not in known]
    found = [(run, run.open(), status) for run in others if (status := _read(run)) is not None]
    try:
        observed = observer.observe_all([(opened, status) for _, opened, status in found])
    except SchedulerError as error:  # what is told of what is on disk must not depend on a slurmctld that answers
        print(f"{error}; what follows is what the run directories say", file=sys.stderr)
        observed = [status for _, _, status in found]
    return [(run, status) for (run, _, _), status in zip(found, observed, strict=True)]


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
