"""Saves and restores a run's state: the one object of checkpoint/ that the training loop talks to.

    loop: copy_to_host() -> slab --write()--> thread: write_shard -> gather -> lease? -> manifest -> rename -> trim
    loop: snapshot() -> slot in memory --------> thread: neighbour's copy -> record
    start: newest of disk and memory -> restore(entries) -> Damaged? set aside, the one before is read over it

All methods except `is_writing` are called by all ranks together. The thread has a group of its own, so that its
collectives never meet the training's. An error of the thread that is no disk's ends the process. loop/saving.py and
loop/tracked.py call it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from jobkit.checkpoint import framework_files, sources
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.memory import Snapshots, with_results
from jobkit.checkpoint.reading import Damaged, agreed
from jobkit.checkpoint.shard import ShardInfo, write_shard
from jobkit.checkpoint.sources import Source
from jobkit.checkpoint.staging import RankPosition, Staged, Stager
from jobkit.checkpoint.store import Manifest, Store
from jobkit.disk import is_full
from jobkit.errors import CheckpointError, JobkitError
from jobkit.log import log
from jobkit.wire.group import RankError, RankGroup

BEAT_SECONDS = 1.0
"""Between two signs of life while the loop waits for the disk."""


@dataclass(kw_only=True)
class Pending:
    """A copy of the state that can be written."""

    step: int
    staged: Staged
    extra: dict[str, Any]
    entries: list[str]
    seconds: float
    """How long the loop waited for the copy."""
    write_files: Callable[[Path], object] | None = None
    """Writes a framework's own files, on all ranks, before the loop goes on."""
    is_written: bool = False
    """True once it was handed to the thread."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a save, the same on all ranks."""

    step: int
    seconds: float
    nbytes: int
    """Of all ranks."""
    error: str | None = None
    is_full: bool = False
    """True if the disk was full."""
    gave_way: int | None = None
    """The step of an older checkpoint that was deleted for it."""


class Checkpointer:
    """The checkpoints of one attempt.

    checkpointer = Checkpointer(run.checkpoints, RankGroup.of_world(), RankPosition(...), attempt=3, keep=3)
    checkpointer.restore([Entry(name="model", live=model)])
    pending = checkpointer.copy_to_host(500, entries, {"boundary": {"step": 500}})
    checkpointer.write(pending, wait=True)
    """

    def __init__(
        self,
        folder: Path,
        ranks: RankGroup,
        position: RankPosition,
        *,
        attempt: int,
        keep: int,
        check_lease: Callable[[], None] = lambda: None,
        slots: tuple[int, int] | None = None,
        best_mode: Literal["min", "max"] = "min",
        beat: Callable[[], None] = lambda: None,
        note_snapshot: Callable[[int], None] = lambda step: None,
        before: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`before`: begin with a state older than this step, where there is one. `device` is this rank's own."""
        self.ranks, self.position = ranks, position
        self.store = Store(folder, str(attempt))
        self.stager = Stager(position, ranks)
        self._keep, self._check_lease, self._best_mode, self._beat = keep, check_lease, best_mode, beat
        self._disk_ranks = ranks if not position.disks else RankGroup.of_parts(position.disks)
        self._thread_ranks = RankGroup.of_world() if ranks.world_size > 1 else ranks
        # A thread begins with device 0, where its first call of CUDA would take memory from another rank.
        is_apart = device is not None and device.index is not None
        self._writers = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="jobkit-checkpoint",
            initializer=partial(torch.accelerator.set_device_index, device) if is_apart else None,
        )
        self._write: Future[Outcome] | None = None
        self._outcomes: list[Outcome] = []
        self.snapshots = Snapshots(slots, self.stager, position, self._thread_ranks, attempt, note_snapshot)
        self.set_aside: list[tuple[int, str]] = []
        """Damaged checkpoints that were found, and why."""
        self.durable_step: int | None = None
        self._before = before
        self._entries: list[Entry] = []
        """The entries that were restored so far."""
        self._weights: Source | None = None
        """Another run's checkpoint, of which modules take the weights where nothing is restored."""
        self._has_weights = False
        if self._disk_ranks.is_main:
            self.store.clean()
        self._best = ranks.broadcast(self.store.best() if ranks.is_main else None)
        self.restored: Source | None = self._newest()
        """The checkpoint that this attempt begins with; None at the run's beginning, and once all is restored."""

    # Restoring

    def _newest(self) -> Source | None:
        """Return the newest checkpoint whose headers verify. Damaged ones are set aside."""
        while True:
            steps = self._steps()
            self.durable_step = steps[0] if steps else None
            steps = [step for step in steps if self._before is None or step < self._before]
            in_memory = self.snapshots.newest(after=steps[0] if steps else None, before=self._before)
            if in_memory is not None:
                return in_memory
            if not steps and self._before is not None:
                self._before = None
                continue
            if not steps:
                if self.set_aside:
                    names = ", ".join(f"step {step} ({reason})" for step, reason in self.set_aside)
                    raise CheckpointError(
                        f"no checkpoint verifies: {names}; they are kept in {self.store.folder} as damaged_step_*; "
                        "--fresh starts a new run at step 0"
                    )
                return None
            try:  # nodes with disks of their own have copies of their own: a damaged one spoils the checkpoint for all
                return agreed(self.ranks, partial(self._of_disk, steps[0]))
            except Damaged as error:
                self._reject(steps[0], str(error))

    def _of_disk(self, step: int) -> Source:
        source = sources.of_disk(self.store.path(step), self._disk_ranks)
        framework_files.check(source, self._disk_ranks)
        return source

    def _steps(self) -> list[int]:
        """Return the steps of the checkpoints that every disk has, newest first.

        Raises CheckpointError where some disk has checkpoints, and no step is on all of them.
        """
        everyones = self.ranks.gather(self.store.steps() if self._disk_ranks.is_main else None)
        by_rank = {rank: steps for rank, steps in enumerate(everyones) if steps is not None}
        common = sorted(set.intersection(*map(set, by_rank.values())), reverse=True)
        newest = max((steps[0] for steps in by_rank.values() if steps), default=None)
        if newest is None or newest in common[:1]:
            return common
        words = "; ".join(
            f"rank {rank}: {', '.join(map(str, sorted(steps))) or 'none'}" for rank, steps in by_rank.items()
        )
        if not common:
            raise CheckpointError(
                f"the machines share no disk, and no checkpoint is on all of them (steps on the disk of {words}): copy "
                f"a folder of {self.store.folder} to the machines that lack it, or continue on the machine that has it"
            )
        if self.ranks.is_main:
            log.warning("the run goes on from step %d, the newest on all disks (%s)", common[0], words)
        return common

    def _reject(self, step: int, reason: str) -> None:
        self.set_aside.append((step, reason))
        if self._protected == {step}:
            self._best = None
        if self._disk_ranks.is_main and self.store.path(step).exists():
            self.store.set_aside(step)
        self.ranks.barrier()

    @property
    def reads(self) -> bool:
        """True where `restore` reads from a checkpoint: with the other ranks."""
        return self.restored is not None or self._weights is not None

    def restore(self, entries: Sequence[Entry]) -> None:
        """Read entries from the checkpoint. If it is damaged, the one before it is read over it, into all entries so
        far. Raises CheckpointError where entries do not fit, or where no checkpoint verifies."""
        self._entries += entries
        self.stager.finders(entries)  # in each attempt, so that an optimizer's parameters have the same names in all
        self._restore(entries)
        if self._weights is not None:
            self._read_weights(self._weights, [entry for entry in entries if isinstance(entry.live, nn.Module)])

    def take_weights(self, folder: Path) -> None:
        """Let modules begin with the weights of a checkpoint of another run."""
        self._weights = agreed(self.ranks, lambda: sources.of_disk(folder, self._disk_ranks))

    def _read_weights(self, source: Source, modules: Sequence[Entry]) -> None:
        if missing := [entry.name for entry in modules if entry.name not in source.manifest.entries]:
            present = ", ".join(source.manifest.entries)
            raise CheckpointError(f"--weights-only: the checkpoint has no {', '.join(missing)}; it has {present}")
        if modules:
            source.read(modules, self.stager, self._disk_ranks)
            self._has_weights = True

    def check_weights(self) -> None:
        """Raise CheckpointError where weights of another run were to be taken, and no module has taken any."""
        if self._weights is not None and not self._has_weights:
            raise CheckpointError("--weights-only: ctx.track was given no model that could take the weights")

    def restore_again(self) -> None:
        """Read all entries once more: lines that ran since may have changed them."""
        self._restore(self._entries)

    def _restore(self, entries: Sequence[Entry]) -> None:
        while self.restored is not None:
            try:
                self._read(entries)
                return
            except Damaged as error:
                log.warning("%s", error)
                if self.restored.where == "memory":
                    self.snapshots.refuse(self.restored.step)
                else:
                    self._reject(self.restored.step, str(error))
                self.restored = self._newest()
                entries = self._entries
                if self.restored is None:  # live tensors have parts of it: the next attempt begins without it
                    raise JobkitError(f"{error}; no other state is left: the next attempt begins at step 0") from error

    def _read(self, entries: Sequence[Entry]) -> None:
        source = self.restored
        assert source is not None
        present = [entry for entry in entries if entry.name in source.manifest.entries]
        if missing := [entry.name for entry in entries if entry not in present and not entry.optional]:
            raise CheckpointError(
                f"the checkpoint of step {source.step} has no {', '.join(missing)}, which the code tracks now; it has "
                f"{', '.join(source.manifest.entries)}: --fresh starts a new run, or leave that untracked"
            )
        ranks = self.ranks if source.where == "memory" else self._disk_ranks
        source.read(present, self.stager, ranks)

    def end_restore(self) -> list[str]:
        """Return the names in the checkpoint that no object asked for, and free the buffers of the restore."""
        source, self.restored = self.restored, None
        self.snapshots.end_restore()
        if source is None:
            return []
        tracked = {entry.name for entry in self._entries}
        return [name for name in source.manifest.entries if name not in tracked]

    # Saving

    def copy_to_host(
        self,
        step: int,
        entries: Sequence[Entry],
        extra: dict[str, Any],
        write_files: Callable[[Path], object] | None = None,
    ) -> Pending:
        """Copy the state into the slab. It waits for a write that still reads the slab."""
        self.wait_for_write()
        began = time.monotonic()
        staged = self.stager.copy_to_host(entries)
        if staged.pickled and self.ranks.is_main:
            log.info("pickled in checkpoints: %s", ", ".join(staged.pickled))
        return Pending(
            step=step,
            staged=staged,
            extra=extra,
            entries=[entry.name for entry in entries],
            seconds=time.monotonic() - began,
            write_files=write_files,
        )

    def write(self, pending: Pending, *, wait: bool = False) -> None:
        """Write a copy in the background. With `wait`, return when it is durable; raises CheckpointError."""
        self.wait_for_write()
        pending.is_written = True
        folder = self._begin(pending.step)
        if pending.write_files is not None and folder is not None:
            framework_files.write(folder, pending.write_files, self._disk_ranks)
        if folder is None:
            self._outcomes.append(self._failed(pending, time.monotonic(), "the disk is full", True))
        else:
            self._write = self._writers.submit(self._written, pending, folder, time.monotonic())
        if wait:
            self.wait()

    def _begin(self, step: int) -> Path | None:
        """Make the folder, on each disk; None where the disk has no room even for that."""
        problem: OSError | None = None
        if self._disk_ranks.is_main:
            try:
                self.store.begin(step)
            except OSError as error:
                problem = error
        if self.ranks.anywhere(problem is not None):
            if problem is not None and not is_full(problem):
                raise problem
            return None
        return self.store.unfinished(step)

    def _written(self, pending: Pending, folder: Path, began: float) -> Outcome:
        """In the thread: write, gather, publish. The loop raises an error that is no disk's, at the next boundary."""
        outcome, gave_way = self._try_to_write(pending, folder, began), None
        while outcome.is_full and (gave_way := self._make_room()) is not None:
            outcome = self._try_to_write(pending, folder, began)
        return replace(outcome, gave_way=gave_way)

    def _try_to_write(self, pending: Pending, folder: Path, began: float) -> Outcome:
        ranks, name = self._thread_ranks, f"rank_{self.position.rank}.safetensors"
        info: ShardInfo | None = None
        problem: OSError | None = None
        try:
            (folder / name).unlink(missing_ok=True)
            info = write_shard(folder / name, pending.staged)
        except OSError as error:
            problem = error
        failure = None if problem is None else (f"rank {self.position.rank}: {problem}", is_full(problem))
        answers = ranks.gather((name, info, failure, pending.staged.nbytes, pending.staged.pickled))
        failed = next((answer[2] for answer in answers if answer[2] is not None), None)
        if failed is not None:
            return self._failed(pending, began, *failed)
        shards = {answer[0]: answer[1] for answer in answers}
        pickled = sorted({path for answer in answers for path in answer[4]})
        try:
            ranks.all_or_none(lambda: self._publish(pending, folder, shards, pickled))
        except (OSError, RankError) as error:
            if isinstance(error, RankError) and not error.disk:
                raise
            return self._failed(pending, began, str(error), is_full(error) or getattr(error, "disk", False))
        self.durable_step = pending.step
        nbytes = sum(answer[3] for answer in answers)
        return Outcome(step=pending.step, seconds=time.monotonic() - began, nbytes=nbytes)

    def _publish(self, pending: Pending, folder: Path, shards: dict[str, ShardInfo], pickled: list[str]) -> None:
        """On the first rank of each disk: give the checkpoint its name, if this attempt still owns the run."""
        if not self._disk_ranks.is_main:
            return
        if self.position.disks:  # each disk has the shards of its own ranks
            shards = {f"rank_{rank}.safetensors": shards[f"rank_{rank}.safetensors"] for rank in self.position.peers}
        self._check_lease()
        manifest = Manifest(
            step=pending.step,
            world_size=self.position.world_size,
            shards=shards,
            entries=pending.entries,
            extra=with_results(pending.extra),
            pickled=pickled,
            files=framework_files.sums(folder),
        )
        self.store.publish(folder, manifest)
        self.store.trim(self._keep, self._protected)

    def is_better(self, value: float) -> bool:
        """Return whether a value of the metric is better than the best checkpoint's."""
        if self._best is None or not math.isfinite(value):
            return math.isfinite(value)
        best = self._best[1]
        return bool(value < best if self._best_mode == "min" else value > best)

    def mark_best(self, pending: Pending, value: float) -> None:
        """Keep a checkpoint as the best; it is written if it was not. All ranks call it with the same value."""
        if not pending.is_written:
            self.write(pending)
        self.wait_for_write()
        if self.durable_step != pending.step:  # the disk is full: the best checkpoint stays the one before
            return

        def mark() -> None:
            if self._disk_ranks.is_main:
                self._check_lease()
                self.store.mark_best(pending.step, value)

        try:
            self.ranks.all_or_none(mark)
        except (OSError, RankError) as error:
            if not (is_full(error) or getattr(error, "disk", False)):
                raise
            log.warning("the checkpoint of step %d is the best, and the disk has no room to say so", pending.step)
            return
        self._best = pending.step, value

    @property
    def _protected(self) -> set[int]:
        """The steps that no other checkpoint pushes out."""
        return set() if self._best is None else {self._best[0]}

    def make_room(self) -> int | None:
        """Delete this disk's oldest checkpoint that is not needed; returns its step, None if there is none."""
        return self.store.make_room(self._protected)

    def _make_room(self) -> int | None:
        """Delete the oldest checkpoint of each disk; returns its step, on all ranks."""
        step = self.make_room() if self._disk_ranks.is_main else None
        return next((other for other in self._thread_ranks.gather(step) if other is not None), None)

    def _failed(self, pending: Pending, began: float, error: str, full: bool) -> Outcome:
        safe = (
            f"the checkpoint of step {self.durable_step} is safe" if self.durable_step is not None else "none is saved"
        )
        return Outcome(
            step=pending.step,
            seconds=time.monotonic() - began,
            nbytes=pending.staged.nbytes,
            error=f"the checkpoint of step {pending.step} was not written ({error}); {safe}",
            is_full=full,
        )

    # The thread's work, as the loop sees it

    @property
    def is_writing(self) -> bool:
        """True while the thread of this rank is busy with a checkpoint."""
        return self._write is not None and not self._write.done()

    def wait_for_write(self) -> None:
        """Return when no checkpoint is being written. Raises LostLease, or the error that ended the thread."""
        if self._write is not None:
            write, self._write = self._write, None
            while not wait([write], BEAT_SECONDS).done:  # a slow disk is no hang
                self._beat()
            self._outcomes.append(write.result())

    def collect(self) -> list[Outcome]:
        """Return the outcomes of saves since the last call, without waiting. Ranks may see them at different times."""
        if self._write is not None and self._write.done():
            self.wait_for_write()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Return when everything is durable. Raises CheckpointError for a checkpoint that could not be written."""
        self.wait_for_write()
        if self._outcomes and self._outcomes[-1].error is not None:
            raise CheckpointError(self._outcomes[-1].error)

    def snapshot(self, step: int, entries: Sequence[Entry], extra: dict[str, Any], least_complete: int) -> float | None:
        """Copy the state into a slot in memory; returns the seconds that the loop waited. None: skipped."""
        return self.snapshots.take(step, entries, extra, least_complete, self._writers)

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self.wait_for_write()
        self._writers.shutdown(wait=True)
