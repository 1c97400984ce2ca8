"""The loop's saves: when it is time (by checkpoint_interval.py), the best metric, and the outcome of a save.

checkpoint.every --> SaveSchedule --due--> loop.py, in the agreement --write--> Checkpointer --> shard.py, store.py
                                 <--outcomes-- costs, warnings

loop.py and epochs.py ask it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobkit.checkpoint.checkpointer import Checkpointer, Pending
from jobkit.config.schema import AUTO
from jobkit.disk import FULL_DISK_SECONDS, is_full
from jobkit.errors import NoRoom, OutsideError
from jobkit.log import log
from jobkit.loop.checkpoint_interval import (
    MAX_OVERHEAD,
    MAX_SECONDS,
    MIN_MEMORY_SECONDS,
    AutoInterval,
    Clock,
    History,
    young,
)
from jobkit.loop.rank import Rank
from jobkit.loop.reporter import Reporter
from jobkit.loop.tracked import Tracked
from jobkit.run.journal import read_status
from jobkit.wire.group import RankError
from jobkit.wire.pages import Phase

RETRY_SECONDS = 60.0
"""After so long a save is tried again that the disk did not take."""

MOST_MISSED = 3
"""So many times `checkpoint.every` are missed on a full disk; then the training waits for room."""

HOLD_SECONDS = 5.0
"""Between two tries of a training that waits for room."""

WriteFiles = Callable[[Path], object]


@dataclass(frozen=True, order=True)
class Boundary:
    """A place between two steps: tracked state is complete, and nothing of the next step has run."""

    step: int = 0
    """Steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches done of the epoch."""


class SaveSchedule:
    """The saves of one attempt."""

    def __init__(self, rank: Rank, checkpointer: Checkpointer, tracked: Tracked, reporter: Reporter) -> None:
        config = rank.config.checkpoint
        self.rank, self.checkpointer, self.tracked, self.reporter = rank, checkpointer, tracked, reporter
        self.best = config.best
        self._history = checkpointer.ranks.broadcast(_history(rank) if rank.rank == 0 else None)
        self._auto = AutoInterval(self._history.seconds_between_deaths) if config.every == AUTO else None
        self._disk = Clock.of(config.every, AutoInterval(self._history.seconds_between_deaths).seconds)
        self._memory = Clock.of(config.memory, 0.0) if checkpointer.snapshots.is_on else Clock()
        self._memory_is_auto = config.memory == AUTO
        self._began = time.monotonic()
        self._stall = 0.0
        self.results: dict[str, float] = {}
        """The last results of `every=` functions: they join the run's result, also in an attempt that calls none."""
        self.write_files: WriteFiles | None = None
        """Writes a framework's own files into each checkpoint: `save` of ctx.boundary."""
        for step, reason in checkpointer.set_aside:
            reporter.warn(f"the checkpoint of step {step} is damaged and was set aside: {reason}")

    def restart(self) -> None:
        """The loop begins: time counts from here."""
        self._began = time.monotonic()
        self._disk.restart()
        self._memory.restart()

    def is_due_after(self, step: int) -> tuple[bool, bool]:
        """Return whether the number of steps calls for a checkpoint, and for a snapshot: the same on every rank."""
        return self._disk.is_due_after(step), self._memory.is_due_after(step) and self.write_files is None

    def is_due_now(self) -> tuple[bool, bool]:
        """Return whether the clock does, on rank 0; while a checkpoint is being written, none is due."""
        if self.rank.rank != 0:
            return False, False
        tries_again = self._error is not None and time.monotonic() - self._failed_at >= RETRY_SECONDS
        disk = (self._disk.is_due_now() or tries_again) and not self.checkpointer.is_writing
        return disk, self._memory.is_due_now() and self.write_files is None

    def urgency(self, step: int) -> int:
        """Return Wish.disk for a checkpoint that is due, as far as this rank has heard of the ones before."""
        return 1 if self._full is None or not self._disk.has_passed(MOST_MISSED - 1, *self._full, step) else 2

    def copy_to_host(self, boundary: Boundary, *, is_last: bool = False) -> Pending:
        """Copy the state: the loop waits for this alone. `is_last`: the training function has returned."""
        self.tracked.check_state()
        extra = {**self._extra(boundary), "is_last": is_last}
        return self.checkpointer.copy_to_host(boundary.step, self.tracked.entries, extra, self.write_files)

    def _extra(self, boundary: Boundary) -> dict[str, Any]:
        """Return the values of a checkpoint beside its entries."""
        results = {name: repr(value) for name, value in self.results.items()}  # JSON has no NaN
        return {"boundary": asdict(boundary), "tensorboard": self.reporter.position(), "results": results}

    def begin_with(self, extra: dict[str, Any]) -> Boundary:
        """Take these values from the checkpoint that the attempt begins with; returns its boundary."""
        self.results = {name: float(text) for name, text in extra["results"].items()}
        return Boundary(**extra["boundary"])

    def write(self, pending: Pending, *, wait: bool = False) -> None:
        """Write a copy in the background; with `wait` return when it is durable. Raises OSError then."""
        self._stall = pending.seconds
        self._disk.restart()
        self._memory.restart()
        if wait:
            self.wait(pending)
        else:
            self.checkpointer.write(pending)

    def wait(self, pending: Pending) -> None:
        """Return when a copy is durable; write it if nobody has. Raises OSError if the disk does not take it."""

        def try_once() -> None:
            if not pending.is_written:
                self.checkpointer.write(pending)
            self.checkpointer.wait_for_write()
            self.take_outcomes()
            if self.checkpointer.durable_step != pending.step:
                pending.is_written = False
                words = self._error or f"the checkpoint of step {pending.step} was not written"
                raise NoRoom(words) if self._full is not None else OutsideError(words)

        self.with_room(try_once)

    def with_room(self, write: Callable[[], None]) -> None:
        """Call a function that writes on behalf of all ranks, until the disk has room for it.

        The state is in this memory alone. Raises NoRoom after FULL_DISK_SECONDS, and any other error at once.
        """
        deadline, beat = time.monotonic() + FULL_DISK_SECONDS, self.rank.page.read()
        while True:
            try:
                write()
                break
            except (OSError, RankError) as error:
                if not (is_full(error) or getattr(error, "disk", False)):
                    raise
                if self.checkpointer.ranks.broadcast(time.monotonic() >= deadline):
                    raise NoRoom(str(error)) from error
                self.reporter.warn("the disk is full or read-only: the training waits for room")
            self.saving()
            time.sleep(HOLD_SECONDS)
        self.rank.beat(beat.step, beat.phase)

    def snapshot(self, boundary: Boundary, least_complete: int) -> None:
        """Copy the state into memory that outlives this rank."""
        self.tracked.check_state()
        extra = self._extra(boundary)
        stall = self.checkpointer.snapshot(boundary.step, self.tracked.entries, extra, least_complete)
        if not self.checkpointer.snapshots.is_on:
            self._memory = Clock()
        if stall is None:
            return
        self._memory.restart()
        if self._memory_is_auto and self.rank.rank == 0:
            lived = (self._history.lived + time.monotonic() - self._began) / (1 + self._history.deaths)
            interval = min(young(stall, lived), MAX_SECONDS)
            self._memory.seconds = max(interval, stall / MAX_OVERHEAD, MIN_MEMORY_SECONDS)

    _error: str | None = None
    """Of the last save; it is tried again RETRY_SECONDS after `_failed_at`."""
    _failed_at = 0.0
    _full: tuple[float, int] | None = None
    """Time and step of the first of the saves in a row for which the disk had no room."""

    def take_outcomes(self) -> None:
        """Take in the outcomes of saves."""
        for outcome in self.checkpointer.collect():
            is_first, self._error = self._error is None, outcome.error
            if outcome.error is not None:
                self._failed_at = time.monotonic()
                self._full = (self._full or (self._failed_at, outcome.step)) if outcome.is_full else None
                if is_first:
                    self.reporter.warn(f"{outcome.error}; it is tried again each minute")
                continue
            self._full = None
            if outcome.gave_way is not None:
                self.reporter.warn(
                    f"the disk is full: the checkpoint of step {outcome.gave_way} gave way to step {outcome.step}"
                )
            if self._auto is not None:
                self._auto.observe(self._stall, outcome.seconds)
                self._disk.seconds = self._auto.seconds
            if self.rank.rank == 0:
                log.info(
                    "checkpoint of step %d: %.2f GB in %.2g s", outcome.step, outcome.nbytes / 1e9, outcome.seconds
                )

    def offer_best(self, pending: Pending, values: dict[str, float]) -> None:
        """Keep a checkpoint as the best if its metric is better than all before. All ranks call it."""
        if self.best is None:
            return
        if self.best.metric not in self.results:
            names = ", ".join(self.results) or "nothing"
            self.reporter.warn(f"checkpoint.best: no evaluation has returned {self.best.metric}; they return {names}")
        value = self.checkpointer.ranks.broadcast(values.get(self.best.metric))  # rank 0 alone may have one
        if value is not None and self.checkpointer.is_better(value):
            self.checkpointer.mark_best(pending, value)
            self.take_outcomes()

    def saving(self) -> None:
        """Say that the last checkpoint is being written: nothing else counts from here on."""
        self.rank.beat(self.rank.page.read().step, Phase.SAVING)


def older_than(rank: Rank) -> int | None:
    """Return the step that this attempt is to come to again from an older state; None for the newest state."""
    ends = [attempt.ended for attempt in read_status(rank.run).attempts if attempt.ended is not None]
    return ends[-1].before_step if ends else None


def _history(rank: Rank) -> History:
    attempts = read_status(rank.run).attempts
    ended = [(attempt.began.time, attempt.ended) for attempt in attempts if attempt.ended is not None]
    return History.of([(began, end) for began, end in ended if end is not None])
