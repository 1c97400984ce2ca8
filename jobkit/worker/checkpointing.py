"""When a checkpoint is due, and how one that was begun ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jobkit.checkpoint.writer import PendingSave, Saved
from jobkit.run.disk import disk_errno, is_disk_error
from jobkit.run.duration import parse_seconds
from jobkit.run.events import Event
from jobkit.worker.interval import AutoInterval, mean_time_between_failures
from jobkit.worker.session import Session

FULL_DISK_PAUSES = (1, 2, 4, 8, 15, 15, 15)
"""Seconds between two tries to end a run whose disk is full."""


class Checkpoints:
    """The checkpoints of one rank's loop; `durable_step` is that of the newest on the disk, None before the first."""

    def __init__(self, session: Session, durable_step: int | None) -> None:
        self.durable_step = durable_step
        self._session = session
        self._every_steps, self._every_seconds = _checkpoint_interval(session.config.checkpoint.every)
        self._auto = _auto_interval(session) if session.config.checkpoint.every == "auto" else None
        self._told_interval = 0.0
        self._pending: PendingSave | None = None
        self._last_save = time.monotonic()

    def start(self) -> None:
        """The loop begins: time counts from here."""
        self._last_save = time.monotonic()

    def is_due_after(self, step: int) -> bool:
        """Whether the number of steps done calls for a checkpoint: the same on every rank."""
        return self._every_steps is not None and step % self._every_steps == 0

    def is_due_by_time(self) -> bool:
        """Whether the clock calls for a checkpoint: rank 0's, which tells the others."""
        every = self._auto.seconds if self._auto is not None else self._every_seconds
        return self._session.is_main and every is not None and time.monotonic() - self._last_save >= every

    def save(
        self,
        step: int,
        state: Callable[[], tuple[Mapping[str, Any], Any, Mapping[str, Sequence[int]]]],
        *,
        wait: bool = False,
        must: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Checkpoint `state()`, (shared, local, held_by), after `step` steps; one that is under way is not repeated.

        With `wait` a failure is raised, unless `must` is off.
        """
        if self._pending is not None and self._pending.step == step and extra is None:
            pending = self._pending
        else:
            position = self._session.mark_metrics()
            shared, local, held_by = state()
            pending = self._pending = self._session.checkpointer.save(
                step,
                shared,
                local,
                held_by=held_by,
                extra=lambda: {"tensorboard": position.result(timeout=60), **(extra or {})},
                on_done=self._saved,
            )
        self._last_save = time.monotonic()
        if wait:
            outcome = pending.outcome()
            if outcome.error is not None and must:
                raise outcome.error

    def wait(self, seconds: float) -> None:
        """Give a checkpoint that is being written this long to become durable: the function has failed meanwhile."""
        if self._pending is not None:
            with suppress(TimeoutError):
                self._pending.outcome(seconds)

    def _saved(self, saved: Saved) -> None:
        """In the writer's thread, on every rank."""
        session = self._session
        session.pulse.beat()
        if saved.error is None:
            self.durable_step = saved.step
            session.record(
                Event.CHECKPOINT, step=saved.step, seconds=round(saved.seconds, 4), stall=round(saved.stall, 4)
            )
            if session.metrics is not None:
                session.metrics.scalars(saved.step, {"perf/checkpoint_seconds": saved.seconds})
            if self._auto is not None and session.is_main:
                self._auto.observe(saved.stall, saved.seconds)
                self._tell_interval(self._auto)
        elif session.is_main:
            session.record(Event.CHECKPOINT_FAILED, step=saved.step, error=str(saved.error))
            print(f"jobkit: {saved.error}; training goes on, step {self.durable_step or 0} is safe", flush=True)

    def _tell_interval(self, auto: AutoInterval) -> None:
        """Print and journal how often there will be a checkpoint, when that has changed by a quarter."""
        if abs(auto.seconds - self._told_interval) > 0.25 * self._told_interval:
            self._told_interval = auto.seconds
            print(f"jobkit: {auto.explain()}", flush=True)
            cost = {"cost": auto.cost, "mtbf": round(auto.mtbf)}
            self._session.record(Event.CHECKPOINT_INTERVAL, seconds=round(auto.seconds, 2), **cost)


def retry_on_full_disk(session: Session, action: Callable[[], None]) -> None:
    """Do, on all ranks together, what the run cannot end without; a disk that refuses it is given a minute.

    After that, or when there is a notice to stop, it is the disk's error on all ranks, and for another attempt.
    """
    for pause in (*FULL_DISK_PAUSES, 0):
        error: Exception | None = None
        try:
            action()
        except Exception as raised:
            if not is_disk_error(raised):
                raise
            error = raised
        number, told = session.control.maximum(disk_errno(error), session.notices.pending)
        if not number:
            return
        if not pause or told:
            raise error or OSError(int(number), f"{os.strerror(int(number))} on another rank")
        if session.is_main:
            what = error or os.strerror(int(number))
            print(f"jobkit: cannot finish: {what}. Waiting for the disk ...", file=sys.stderr, flush=True)
        time.sleep(pause)


def _checkpoint_interval(every: str | int) -> tuple[int | None, float | None]:
    """(steps, seconds) between two checkpoints; at least one of them is None, both for `auto`."""
    if every == "auto":
        return None, None
    if isinstance(every, int):
        return every, None
    return None, parse_seconds(every)


def _auto_interval(session: Session) -> AutoInterval:
    """The interval to begin with, by what the run has seen so far."""
    configured = session.config.checkpoint.mtbf
    if not session.is_main:
        return AutoInterval(0.0)  # rank 0 alone looks at the clock
    if configured != "auto":
        return AutoInterval(float(parse_seconds(configured)))
    return AutoInterval(mean_time_between_failures(session.run.status().attempts[:-1]))
