"""Rows of `jobkit list`: what a run has under each name, for columns, conditions and sorting.

    status.json (one read a run) --read_rows--> Row.value("params.lr"), Row.value("state"), Row.value("train/loss")

Only runs that have not finished cost more: their progress.json, and one question to Slurm for all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run.accounting import accounts, goodput
from jobkit.run.journal import cached_status, read_status
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.view import UNDER_WAY, View, look


@dataclass(frozen=True)
class Row:
    """A run in the list."""

    run: RunDir
    status: Mapping[str, Any]
    """The content of status.json."""
    view: View | None
    """Of a run that is queued or running."""
    progress: Progress | None
    """Of a run that has not finished."""
    turn: str | None
    """Of a run that waits for devices of this machine."""

    def value(self, key: str) -> Any:
        """Return what the run has of that name; None where it has nothing."""
        if key in FACTS:
            return FACTS[key](self)
        branch, dot, rest = key.partition(".")
        if dot and branch in ("params", "result"):
            return _part(FACTS[branch](self), rest)
        metric = _part(self.status.get("result"), key)
        return self.values.get(key) if metric is None else metric

    @property
    def values(self) -> Mapping[str, Any]:
        """What it logged last."""
        return self.progress.values if self.progress is not None else {}

    def keys(self) -> Iterator[str]:
        """Yield the names of its params, results and metrics."""
        for prefix, branch in (("params.", "params"), ("result.", "result"), ("", "result")):
            yield from (name for name, _ in leaves(FACTS[branch](self), prefix))
        yield from self.values

    def as_json(self) -> dict[str, Any]:
        """Return the whole status with what the list adds to it, for programs."""
        added = {key: FACTS[key](self) for key in ("path", "state", "step", "total_steps", "eta", "waits", "job")}
        return {**self.status, "run": self.run.name, **added, "values": dict(self.values)}


def _of_attempts(row: Row, field: str) -> Any:
    """The newest value of a field of `attempt ended`."""
    ends = (attempt.get("ended", {}).get(field) for attempt in reversed(row.status.get("attempts", ())))
    return next((value for value in ends if value is not None), None)


def _step(row: Row) -> Any:
    attempts = row.status.get("attempts")
    is_new = row.progress is not None and attempts and row.progress.attempt == attempts[-1]["number"]
    return row.progress.step if row.progress is not None and is_new else _of_attempts(row, "last_step")


def _eta(row: Row) -> float | None:
    progress = row.progress
    if progress is None or progress.step is None or not (progress.total_steps and progress.steps_per_second):
        return None
    steps = max(0, progress.total_steps - progress.step)
    return round(steps / progress.steps_per_second, 1) if FACTS["state"](row) == "running" else None


def _goodput(row: Row) -> float | None:
    share = goodput(accounts(Status.of(row.status), row.progress, time.time()))
    return None if share is None else round(share, 4)


def _submitted(row: Row) -> Mapping[str, Any]:
    submitted: Mapping[str, Any] = row.status.get("submitted", {})
    return submitted


def _config(row: Row) -> Mapping[str, Any]:
    config: Mapping[str, Any] = _submitted(row).get("config", {})
    return config


def _waits(row: Row) -> str | None:
    is_pending = row.view is not None and row.view.is_pending and row.view.job is not None
    return row.view.job.reason if row.view and row.view.job and is_pending else row.turn


FACTS: dict[str, Callable[[Row], Any]] = {
    "run": lambda row: row.run.name,
    "state": lambda row: row.view.state if row.view is not None else row.status.get("state", "new"),
    "step": _step,
    "total_steps": lambda row: row.progress.total_steps if row.progress is not None else None,
    "eta": _eta,
    "waits": _waits,
    "attempts": lambda row: len(row.status.get("attempts", ())),
    "checkpoint": lambda row: row.run.durable_step() if row.view is not None else _of_attempts(row, "durable_step"),
    "goodput": _goodput,
    "age": lambda row: round(max(0.0, time.time() - row.status.get("since", 0.0)), 1),
    "where": lambda row: _submitted(row).get("entry") or _submitted(row).get("scheduler"),
    "job": lambda row: row.view.job_id if row.view is not None else row.status.get("job_id"),
    "seed": lambda row: _config(row).get("seed"),
    "name": lambda row: _config(row).get("name"),
    "path": lambda row: str(row.run.path),
    "params": lambda row: _config(row).get("params"),
    "result": lambda row: row.status.get("result"),
}
"""Names that every run has, or could have; other names are `params.x`, `result.x` and metrics."""


def read_rows(runs: Iterable[RunDir]) -> list[Row]:
    """Return the rows of runs; a run that cannot be read is left out, with a line on standard error."""
    read: list[tuple[RunDir, Mapping[str, Any]]] = []
    for run in runs:
        try:
            read.append((run, cached_status(run) or read_status(run).as_dict()))
        except OSError as error:  # another user's, or removed in this moment
            print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
    views = {
        view.run.path: view
        for view in look([(run, Status.of(status)) for run, status in read if status.get("state") in UNDER_WAY])
    }
    waiting = {}
    if any(view.job is None for view in views.values()):
        from jobkit.supervisor.devices import turns  # most lists need no look at this machine

        waiting = turns()
    rows = []
    for run, status in read:
        view = views.get(run.path)
        if view is not None and view.status.state not in UNDER_WAY:  # it ended since
            status, view = view.status.as_dict(), None
        progress = run.progress() if status.get("state") != "finished" else None
        rows.append(Row(run, status, view, progress, waiting.get(str(run.path))))
    return rows


def check_keys(keys: Iterable[str], option: str, rows: Sequence[Row]) -> None:
    """Raise InputError for a name that no row has anything of; without rows no name is wrong."""
    unknown = [key for key in keys if key not in FACTS]
    names = {name for row in rows for name in row.keys()} if unknown else set()  # noqa: SIM118 - no mapping
    for key in unknown if names else ():
        if key not in names:
            allowed = sorted({*names, *FACTS})
            ends = [name for name in allowed if name.rpartition(".")[2] == key]
            hint = f"did you mean {ends[0]!r}?" if ends else nearest(key, allowed)
            raise InputError(key=option, found=key, allowed=f"one of {', '.join(allowed[:24])}", hint=hint)


def leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of nested mappings."""
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if isinstance(item, Mapping):
            yield from leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _part(value: Any, name: str) -> Any:
    """The value of a dotted name in nested mappings, whose own names may have dots."""
    if not isinstance(value, Mapping):
        return None
    if name in value:
        return value[name]
    heads = (name[:at] for at, sign in enumerate(name) if sign == ".")
    return next((_part(value[head], name[len(head) + 1 :]) for head in heads if head in value), None)
