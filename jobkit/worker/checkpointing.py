"""The checkpoints of a run: what is in them, and what the journal is told of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobkit.checkpoint import own_files
from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.state import flatten, rng_state
from jobkit.checkpoint.writer import Checkpointer, PendingSave, Saved
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.status import Attempt
from jobkit.train.seeds import preserved_generators
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


@dataclass(frozen=True)
class Place:
    """Where a loop stands between two steps; what follows the last step of an epoch, a step may have several."""

    step: int
    """Steps done."""
    number: int = 0
    """Of the place, among those of this step."""


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
        self._durable_place = None if restored is None else Place(restored)
        self.schedule, self.memory_schedule = schedule, memory_schedule
        self._rank, self._checkpointer, self._tracked, self._reporter = rank, checkpointer, tracked, reporter
        self._pending: PendingSave | None = None
        self._pending_place: Place | None = None
        self._replicas = Replicas(rank.group)

    def check_state(self) -> None:
        """Raise UsageError, on all ranks, where there is state that cannot be saved, or differs where one is kept."""
        shared, held_by, own = self._tracked.trees()
        self._rank.group.all_or_none(lambda: _check_can_be_saved({**shared, **own.get("objects", {})}))
        if self._rank.topology.world_size > 1:
            self._replicas.check(self._tracked.objects, shared, held_by)

    def save(
        self,
        place: Place,
        *,
        wait: bool = False,
        must: bool = True,
        is_last: bool = False,
        extra: Mapping[str, Any] | None = None,
        write_files: own_files.Write | None = None,
    ) -> None:
        """Checkpoint the state at a place, on all ranks together; one that is under way is not repeated.

        `extra` is JSON for the manifest. `write_files` writes files of its own into a folder of the checkpoint. With
        `wait` a failure is raised, unless `must` is off. With `is_last`, or `wait`, the loop ends after it: nobody is
        told how often there will be another.
        """
        if self._pending is None or self._pending_place != place or extra is not None:
            self._pending_place = place
            done = partial(self._saved, place, another=not (wait or is_last))
            # What is waited for is the last of this attempt: its way to the disk is not to be made longer.
            self._pending = self._begin(
                place.step, extra or {}, on_done=done, in_memory=not wait, write_files=write_files
            )
        self.schedule.restart()
        if wait:
            outcome = self._pending.outcome()
            if outcome.error is not None and must:
                raise outcome.error

    def is_durable(self, place: Place) -> bool:
        """Whether this attempt has made a checkpoint of it."""
        return self._durable_place == place

    def is_safe(self, place: Place) -> bool:
        """Whether a checkpoint of it is on the disk, be it an earlier attempt's, or on its way there."""
        is_pending = self._pending is not None and self._pending_place == place and not self._pending.has_failed
        return is_pending or self.is_durable(place)

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
        write_files: own_files.Write | None = None,
    ) -> PendingSave:
        # Before the state is copied: the curves of the steps in this checkpoint, and of none after it.
        position = self._reporter.mark_metrics()
        shared, held_by, own = self._tracked.trees()
        if self._rank.topology.world_size > 1:
            self._replicas.check(self._tracked.objects, shared, held_by)
        self.memory_schedule.restart()
        everyones = self._tracked.manifest_entries()
        devices = self._rank.devices
        with preserved_generators(*devices) if write_files is not None else nullcontext():
            return self._checkpointer.save(
                step,
                shared,
                {"rng": rng_state(*devices), **own},
                held_by=held_by,
                extra=lambda: {"tensorboard": position(), **everyones, **extra},
                # The next attempt may begin there without another checkpoint: no point may be lost that is not written.
                memory_extra=lambda: {"tensorboard": self._reporter.on_disk(position()), **everyones},
                on_done=on_done,
                to_disk=to_disk,
                in_memory=in_memory and write_files is None,  # no rank could be started from it
                write_files=write_files,
            )

    def wait(self, seconds: float | None = None) -> None:
        if self._pending is not None:
            with suppress(TimeoutError):
                self._pending.outcome(seconds)

    def _saved(self, place: Place, saved: Saved, *, another: bool) -> None:
        """In the writer's thread, on every rank; `another` may follow."""
        with self._reporter.in_a_thread():
            self._reporter.heartbeat.beat()
            if saved.error is None:
                self.durable_step, self._durable_place = saved.step, place
                self._report(saved, another)
            elif self._rank.is_main:
                self._reporter.record(Event.CHECKPOINT_FAILED, step=saved.step, error=str(saved.error))
                goes_on = "training goes on, " if self._reporter.heartbeat.training else ""
                safe = "there is none yet" if self.durable_step is None else f"that of step {self.durable_step} is safe"
                log.info("%s; %s%s", saved.error, goes_on, safe)

    def _report(self, saved: Saved, another: bool) -> None:
        costs = {"seconds": round(saved.seconds, 4), "stall": round(saved.stall, 4)}
        self._reporter.record(Event.CHECKPOINT, step=saved.step, **costs)
        self._reporter.scalars(saved.step, {"perf/checkpoint_seconds": saved.seconds})
        auto = self.schedule.auto
        if self._rank.is_main and self.schedule.observe(saved.stall, saved.seconds) and auto is not None:
            heartbeat = self._reporter.heartbeat
            if another and heartbeat.training and not heartbeat.stopping:
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
