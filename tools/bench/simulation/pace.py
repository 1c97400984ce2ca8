"""How a loop comes along between two interruptions: steps, checkpoints, and snapshots in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.cluster import Cluster
from bench.simulation.policy import Policy

from jobkit.run.duration import parse_seconds
from jobkit.run.status import Attempt
from jobkit.worker.checkpoint_schedule import CheckpointSchedule, MemorySchedule


@dataclass(frozen=True)
class Way:
    """What a loop has done after some seconds; progress in seconds of steps since it began."""

    progress: float
    durable: float | None
    """Progress at the newest checkpoint that is on the disk; None where there is none since the loop began."""
    memory: float | None
    """The same of what the nodes' memory holds, as long as that is there."""
    checkpoints: float
    """Seconds that the loop stood still for checkpoints."""
    snapshots: float
    """The same for snapshots."""


@dataclass(frozen=True)
class Pace:
    """The rhythm of an attempt; all in seconds."""

    first: float
    """From the beginning of the loop to its first checkpoint."""
    every: float
    """From the end of a checkpoint's stall to the next one."""
    stall: float
    durable: float
    """From the beginning of a checkpoint until it is on the disk."""
    memory: float = math.inf
    """From the beginning of a snapshot, or checkpoint, to the next snapshot."""
    memory_stall: float = 0.0
    margin: float = 0.0
    """For how long before a checkpoint no snapshot is taken."""

    @classmethod
    def of(cls, policy: Policy, cluster: Cluster, earlier: Sequence[Attempt]) -> Pace:
        """As jobkit's own schedules find it, once they have seen what a checkpoint costs."""
        schedule = CheckpointSchedule(policy.checkpoint, earlier)
        stall = cluster.durable if policy.blocks else cluster.stall
        if schedule.auto is not None:
            first = schedule.auto.seconds
            schedule.observe(stall, cluster.durable)
            every = schedule.auto.seconds
        else:
            first = every = parse_seconds(str(policy.checkpoint.every))
        memory = MemorySchedule(policy.checkpoint.memory, earlier)
        memory.observe(cluster.stall)
        if memory.seconds is None:
            return cls(first, every, stall, cluster.durable)
        between = max(memory.seconds, cluster.stall)
        return cls(first, every, stall, cluster.durable, between, cluster.stall, memory.margin)

    def after(self, seconds: float) -> Way:
        """What has been done so long after the loop began."""
        if seconds <= self.first:
            return self._part(seconds, self.first, stall=0.0, snapshot=0.0, before=0.0)
        cycle = self.stall + self.every
        whole, rest = divmod(seconds - self.first, cycle)
        # No snapshot is taken while a checkpoint is being written.
        snapshot = max(self.memory, self.durable, self.stall)
        begun = self._part(self.first, self.first, stall=0.0, snapshot=0.0, before=0.0)
        one = self._part(cycle, cycle, self.stall, snapshot, begun.progress)
        gained = one.progress - begun.progress
        saved = begun.progress + whole * gained
        here = self._part(rest, cycle, self.stall, snapshot, saved)
        memory = here.memory
        if memory is None:  # the checkpoint is not whole yet: what was there before it
            memory = one.memory + (whole - 1) * gained if whole and one.memory is not None else begun.memory
        return Way(
            progress=here.progress,
            durable=saved if rest >= self.durable else saved - gained if whole else None,
            memory=memory,
            checkpoints=whole * self.stall + here.checkpoints,
            snapshots=begun.snapshots + whole * one.snapshots + here.snapshots,
        )

    def _part(self, seconds: float, length: float, stall: float, snapshot: float, before: float) -> Way:
        """The first seconds of a part that begins with a checkpoint's stall, 0 for none, and ends after `length` with
        the next checkpoint; `snapshot` is when its first snapshot begins, `before` the progress at its beginning."""
        stalled, snapshots = min(seconds, stall), 0.0
        has_memory = self.memory < math.inf
        newest = before if has_memory and stall and seconds >= stall else None  # a checkpoint lies there, too
        until = min(seconds, length - self.margin) if snapshot else seconds  # the first of all is taken at once
        if has_memory and seconds > snapshot and until >= snapshot:
            last = math.floor((until - snapshot) / self.memory)
            into = seconds - snapshot - last * self.memory
            snapshots = last * self.memory_stall + min(self.memory_stall, into)
            whole = last if into >= self.memory_stall else last - 1
            if whole >= 0:
                newest = before + snapshot - stall + whole * (self.memory - self.memory_stall)
        return Way(before + seconds - stalled - snapshots, None, newest, stalled, snapshots)
