"""The checkpoints of a run: what is in them, and what the journal is told of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.state import flatten, rng_state
from jobkit.checkpoint.writer import Checkpointer, PendingSave, Saved
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.status import Attempt
from jobkit.worker.checkpoint_schedule import CheckpointSchedule, MemorySchedule
from jobkit.worker.rank import Rank
from jobkit.worker.replicas import Replicas
from jobkit.worker.reporter import RunReporter
from jobkit.worker.tracked_state import TrackedState


def find_memory(rank: Rank, ranks: RankGroup, earlier: Sequence[Attempt]) -> SnapshotMemory | None:
    """Where this rank's parent keeps snapshots for it, if it does; `earlier` are the attempts before, on rank 0."""
    trained = max((attempt.id for attempt in earlier if attempt.resumed is not None), default=0)
    return SnapshotMemory.find(
        os.environ,
        ranks,
        rank.topology.local_world_size,
        run=rank.run.name,
        attempt=rank.attempt,
        trained=trained,
    )


class Checkpoints:
    """The checkpoints of one rank's loop, on the disk and in memory.

    `restored` is the step of the newest on the disk when the attempt began.
    """

    def __init__(
        self,
        rank: Rank,
        checkpointer: Checkpointer,
        tracked: TrackedState,
        schedule: CheckpointSchedule,
        memory_schedule: MemorySchedule,
        reporter: RunReporter,
        restored: int | None,
    ) -> None:
        self.durable_step = restored
        """Step of the newest checkpoint on the disk, None before the first."""
        self.schedule, self.memory_schedule = schedule, memory_schedule
        self._rank, self._checkpointer, self._tracked, self._reporter = rank, checkpointer, tracked, reporter
        self._pending: PendingSave | None = None
        self._replicas = Replicas(rank.group)

    def check_state(self) -> None:
        """Raise UsageError, on all ranks, where there is state that cannot be saved, or differs where one is kept."""
        shared, held_by, own = self._tracked.trees()
        self._rank.group.all_or_none(lambda: _check_can_be_saved({**shared, **own.get("objects", {})}))
        if self._rank.topology.world_size > 1:
            self._replicas.check(self._tracked.objects, shared, held_by)

    def save(self, step: int, *, wait: bool = False, must: bool = True, extra: Mapping[str, Any] | None = None) -> None:
        """Checkpoint the state after `step` steps, on all ranks together; one that is under way is not repeated.

        `extra` is JSON for the manifest. With `wait` a failure is raised, unless `must` is off.
        """
        if self._pending is None or self._pending.step != step or extra is not None:
            # What is waited for is the last of this attempt: its way to the disk is not to be made longer.
            self._pending = self._begin(step, extra or {}, on_done=self._saved, in_memory=not wait)
        self.schedule.restart()
        if wait:
            outcome = self._pending.outcome()
            if outcome.error is not None and must:
                raise outcome.error

    def snapshot(self, step: int) -> None:
        """Keep the state after `step` steps in memory, on all ranks together; not while something is being written.

        Then it would hold up the training until that is on the disk.
        """
        checkpointer = self._checkpointer
        if not checkpointer.has_memory:
            return
        # All ranks ask: that there is no room, or that something is written, one may learn before the others.
        if not self._rank.group.anywhere(checkpointer.is_busy or not checkpointer.takes_snapshots):
            started = time.perf_counter()
            self._begin(step, {}, to_disk=False)
            self.memory_schedule.observe(time.perf_counter() - started)

    def _begin(
        self,
        step: int,
        extra: Mapping[str, Any],
        on_done: Callable[[Saved], None] | None = None,
        *,
        to_disk: bool = True,
        in_memory: bool = True,
    ) -> PendingSave:
        # Before the state is copied: the curves of the steps in this checkpoint, and of none after it.
        position = self._reporter.mark_metrics()
        shared, held_by, own = self._tracked.trees()
        if self._rank.topology.world_size > 1:
            self._replicas.check(self._tracked.objects, shared, held_by)
        self.memory_schedule.restart()
        return self._checkpointer.save(
            step,
            shared,
            {"rng": rng_state(*self._rank.devices), **own},
            held_by=held_by,
            extra=lambda: {"tensorboard": position(), **extra},
            # The next attempt may begin there without another checkpoint: no point may be lost that is not yet written.
            memory_extra=lambda: {"tensorboard": self._reporter.on_disk(position())},
            on_done=on_done,
            to_disk=to_disk,
            in_memory=in_memory,
        )

    def wait(self, seconds: float | None = None) -> None:
        if self._pending is not None:
            with suppress(TimeoutError):
                self._pending.outcome(seconds)

    def _saved(self, saved: Saved) -> None:
        """In the writer's thread, on every rank."""
        with self._reporter.in_a_thread():
            self._reporter.heartbeat.beat()
            if saved.error is None:
                self.durable_step = saved.step
                self._report(saved)
            elif self._rank.is_main:
                self._reporter.record(Event.CHECKPOINT_FAILED, step=saved.step, error=str(saved.error))
                log.info("%s; training goes on, step %d is safe", saved.error, self.durable_step or 0)

    def _report(self, saved: Saved) -> None:
        costs = {"seconds": round(saved.seconds, 4), "stall": round(saved.stall, 4)}
        self._reporter.record(Event.CHECKPOINT, step=saved.step, **costs)
        self._reporter.scalars(saved.step, {"perf/checkpoint_seconds": saved.seconds})
        auto = self.schedule.auto
        if self._rank.is_main and self.schedule.observe(saved.stall, saved.seconds) and auto is not None:
            log.info("%s", auto.explain())
            self._reporter.record(
                Event.CHECKPOINT_INTERVAL, seconds=round(auto.seconds, 2), cost=auto.cost, mtbf=round(auto.mtbf)
            )


def _check_can_be_saved(trees: Mapping[str, Any]) -> None:
    for name, tree in trees.items():
        try:
            flatten(tree)
        except Exception as error:
            raise UsageError(
                f"{name}: its state_dict holds what cannot be saved ({type(error).__name__}: {error}); leave that out "
                "of it, or make it something that pickle takes"
            ) from None
