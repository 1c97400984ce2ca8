"""What a submission of a run that is under way asks for, and its job does not get: it keeps what it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jobkit.errors import InputError
from jobkit.run import secrets
from jobkit.run.config import Config
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.submission.plan import LaunchPlan


def unapplied(run: RunDir, status: Status, plan: LaunchPlan) -> tuple[str, ...]:
    """A text for each difference, as `resources.time 0:05:00 (not 2:00:00)`; none where the job's config is unknown."""
    try:
        before = run.config()
    except (InputError, OSError):
        return ()
    if status.cluster != plan.cluster:
        return (f"cluster {status.cluster} (not {plan.cluster})",)
    found = list(_differences(_of_the_job(before, plan.cluster), _of_the_job(plan.config, plan.cluster)))
    if plan.turn.priority != status.priority:
        found.append(("--priority", status.priority, plan.turn.priority))
    return tuple(f"{key} {_shown(old)} (not {_shown(new)})" for key, old, new in found)


def _of_the_job(config: Config, cluster: str) -> dict[str, Any]:
    values = secrets.masked(dataclasses.asdict(config))
    entry = values["clusters"].get(cluster)
    return {**values, "clusters": {} if entry is None else {cluster: entry}}


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, old, new


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
