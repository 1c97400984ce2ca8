"""Saves off the hot path: the training loop waits for a memory copy, a thread does everything after it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.checkpoint import own_files
from jobkit.checkpoint.checkpoint_error import as_checkpoint_error
from jobkit.checkpoint.disks import SAVE, Disks
from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.reader import Reader, RestoredCheckpoint
from jobkit.checkpoint.save_plan import SavePlans
from jobkit.checkpoint.staging import HostBuffers, Staged, Stager
from jobkit.checkpoint.storage import write_items
from jobkit.checkpoint.store import FileDigest, Manifest, Store
from jobkit.errors import CheckpointError, JobkitError
from jobkit.group import RankGroup, describe
from jobkit.log import log
from jobkit.run.disk_errors import disk_errno
from jobkit.run.identity import Owner


@dataclass(frozen=True)
class Saved:
    """How a save ended: `error` is None where the checkpoint is published and durable."""

    step: int
    stall: float
    """Seconds for which `save` held the training loop, waiting for the save before it included."""
    seconds: float
    """Seconds from the call of `save` until the checkpoint was durable, or had failed."""
    nbytes: int
    """Bytes of tensors that this rank copied."""
    error: CheckpointError | None = None


class PendingSave:
    """A save under way."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._ended = threading.Event()
        self._saved: Saved | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have."""
        return self._saved is not None and self._saved.error is not None

    def outcome(self, timeout: float | None = None) -> Saved:
        """How it ended, once it has; TimeoutError after `timeout` seconds."""
        self._ended.wait(timeout)
        if self._saved is None:
            raise TimeoutError(f"the checkpoint of step {self.step} is not written after {timeout} s")
        return self._saved

    def wait(self, timeout: float | None = None) -> Saved:
        """`outcome`, but raises the CheckpointError of a save that failed."""
        saved = self.outcome(timeout)
        if saved.error is not None:
            raise saved.error
        return saved

    def _end(self, saved: Saved) -> None:
        self._saved = saved
        self._ended.set()


class Checkpointer:
    """Saves and loads the checkpoints of a store, on all ranks together, and keeps the newest `keep`.

    `ranks` are in a group that nothing else uses: the writing thread's collectives must not mix with the training's.
    None for a process that is alone, which needs no process group. `may_publish` is asked on rank 0 at the last
    moment: an attempt that has lost its lease must not publish. With `memory`, of the same ranks, every checkpoint is
    staged where it outlives the rank, and there can be snapshots between them that go to no disk. `owner` is written
    into each checkpoint.

    With several `disks`, `ranks` are those that share the one of `store`. They keep a whole checkpoint on each, but for
    the local trees of other ranks; that works for state that each rank has whole.
    """

    def __init__(
        self,
        store: Store,
        ranks: RankGroup | None = None,
        *,
        keep: int = 3,
        may_publish: Callable[[], bool] | None = None,
        memory: SnapshotMemory | None = None,
        ranks_per_node: int = 1,
        disks: Disks | None = None,
        owner: Owner | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, found {keep}")
        self.store = store
        self._ranks = ranks or RankGroup.alone()
        self._memory = memory
        self._disks = disks or Disks(self._ranks)
        self._reader = Reader(store, self._ranks, memory, self._disks)
        self._stager = Stager(self._ranks.rank, self._ranks.world_size, ranks_per_node, self._ranks.number)
        self._plans = SavePlans(self._ranks)
        self._buffers = HostBuffers()
        self._complaint = ""
        self._keep = keep
        self._may_publish = may_publish
        self._owner = owner or Owner()
        self._thread: threading.Thread | None = None

    @property
    def set_aside(self) -> list[tuple[int, str]]:
        """The checkpoints that `load_newest` found bad, as (step, reason)."""
        return self._reader.set_aside

    @property
    def refused(self) -> list[tuple[int, str]]:
        """The snapshots in memory that `load_newest` could not use, as (step, reason)."""
        return [] if self._memory is None else self._memory.refused

    @property
    def has_memory(self) -> bool:
        """Whether there was memory for snapshots at the start: the same on all ranks."""
        return self._memory is not None

    @property
    def takes_snapshots(self) -> bool:
        """Whether there is room for them still: the same on all ranks once no save is under way."""
        return self._memory is not None and self._memory.is_on

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, for which the next one would wait."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        shared: Mapping[str, Any],
        local: Any = None,
        extra: Callable[[], dict[str, Any]] | None = None,
        on_done: Callable[[Saved], None] | None = None,
        held_by: Mapping[str, Sequence[int]] | None = None,
        *,
        memory_extra: Callable[[], dict[str, Any]] | None = None,
        to_disk: bool = True,
        in_memory: bool = True,
        write_files: own_files.Write | None = None,
    ) -> PendingSave:
        """Copy the state and return; the checkpoint of `step` steps done appears later, or does not.

        `shared`: state_dicts by name, the same on all ranks (replicated tensors or DTensors); of one that only some
        ranks have, as a pipeline's stage, `held_by` gives those ranks, in the same order on each. `local`: this rank's
        own tree. `extra`: JSON for the manifest, asked for on rank 0 at the end. `on_done` is called on every rank, in
        the background thread, also for a save that failed. Nothing is raised here: a failure on any rank is the
        `error` of the outcome on all. Waits for the save before it.

        Where there is memory for snapshots it is one as well, unless `in_memory` is off: then no rank is ever started
        from there. Without `to_disk` it is nothing else. `memory_extra` is its `extra`, where that is another.

        `write_files` writes files of its own into a folder of the checkpoint, on all ranks, before this returns. Where
        a disk does not take them the save has failed; what else it raises is raised here, on all ranks.
        """
        started = time.perf_counter()
        self.wait()
        pending = PendingSave(step)
        if write_files is not None and (error := self._files_error(step, write_files)) is not None:
            seconds = time.perf_counter() - started
            self._end(pending, Saved(step, seconds, seconds, 0, error), on_done)
            return pending
        staged = self._stage(shared, local, held_by or {}, to_disk)
        stall = time.perf_counter() - started
        in_memory = in_memory and self.takes_snapshots

        def finish() -> None:
            error = self._keep_in_memory(step, staged, memory_extra or extra) if in_memory else None
            if to_disk:
                error = self._write_to_disk(step, staged, extra, has_files=write_files is not None)
            if self._memory is not None and not self._memory.is_on:
                self._memory.release()
            saved = Saved(step, stall, time.perf_counter() - started, staged.nbytes, error)
            self._end(pending, saved, on_done)
            if error is None and to_disk:
                self._retain()  # only now: without the new one the oldest may be the only good one

        self._thread = threading.Thread(target=finish, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        return pending

    def _files_error(self, step: int, write_files: own_files.Write) -> CheckpointError | None:
        """Write them; the error where a disk does not take them. Any other is raised as it is."""
        try:
            own_files.write(step, write_files, self.store, self._ranks, self._disks)
        except Exception as error:
            if self._ranks.is_main:
                self.store.discard_staging(step)
            if not disk_errno(error):
                raise
            failed = CheckpointError(f"the checkpoint of step {step} was not written: {describe(error)}")
            failed.errno = disk_errno(error)
            return failed
        return None

    def _end(self, pending: PendingSave, saved: Saved, on_done: Callable[[Saved], None] | None) -> None:
        try:
            if on_done is not None:
                on_done(saved)
        except Exception:
            log.exception("on_done failed for the checkpoint of step %d", saved.step)
        pending._end(saved)

    def _stage(
        self, shared: Mapping[str, Any], local: Any, held_by: Mapping[str, Sequence[int]], to_disk: bool
    ) -> Staged:
        if self._memory is None or not self._memory.is_on:
            return self._stager.stage(shared, local, held_by, self._buffers)
        staged = self._stager.stage(shared, local, held_by, self._memory.begin(), on_each_node=True)
        if staged.no_room is not None and to_disk:
            reason = staged.no_room
            staged = self._stager.stage(shared, local, held_by, self._buffers, on_each_node=True)
            staged.no_room = reason
        return staged

    def _keep_in_memory(
        self, step: int, staged: Staged, extra: Callable[[], dict[str, Any]] | None
    ) -> CheckpointError | None:
        assert self._memory is not None
        try:
            with as_checkpoint_error("one was not taken"):
                self._memory.complete(staged, step, extra)
        except CheckpointError as error:
            self._complain(error)
            return error
        return None

    def _write_to_disk(
        self, step: int, staged: Staged, extra: Callable[[], dict[str, Any]] | None, *, has_files: bool
    ) -> CheckpointError | None:
        try:
            with as_checkpoint_error(f"the checkpoint of step {step} was not written", self._ranks):
                self._write(step, staged, extra, has_files=has_files)
        except CheckpointError as error:
            return error
        return None

    def _complain(self, error: CheckpointError) -> None:
        """Say once why there is no snapshot: they are frequent. A rank that has died is for others to tell of."""
        is_lost = isinstance(error.__cause__, RuntimeError)  # gloo's
        if self._ranks.is_main and not is_lost and str(error) != self._complaint:
            self._complaint = str(error)
            log.info("no snapshots in memory: %s", error)

    def wait(self) -> None:
        """Return when no save is under way; how they ended is for their PendingSave to say."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, and give the host memory back."""
        self.wait()
        self._buffers = HostBuffers()

    def load_newest(
        self, templates: Mapping[str, Any] | None = None, names: Collection[str] | None = None
    ) -> RestoredCheckpoint | None:
        """The newest checkpoint that verifies on all ranks, or None where there is none. Collective.

        One that does not verify is set aside by rank 0, appears in `set_aside`, and the one before is taken. A snapshot
        in memory is taken where it is whole on all ranks together and no older than the checkpoint. Those that are not
        taken are gone. Where there are checkpoints and none of them is good, that is a CheckpointError that names them.
        `templates`: live trees by name; their DTensors are filled in place and returned where the saved tree has a
        tensor at the same path. All other tensors come whole, on the CPU. `names`: which shared trees to read, all
        where None. Raises CheckpointError where a good checkpoint cannot be read into the templates, or where a rank
        sees files damaged or missing that rank 0 sees whole: that is the node's fault, not the checkpoint's.
        """
        self.wait()
        loaded = self._reader.load_newest(templates or {}, names)
        if self._memory is not None:
            self._memory.keep(loaded.snapshot if loaded is not None else None)
        return loaded

    def read(
        self,
        loaded: RestoredCheckpoint,
        templates: Mapping[str, Any],
        wants: Callable[[str, str], bool] = lambda name, path: True,
    ) -> dict[str, Any]:
        """Shared trees of a checkpoint that `load_newest` has chosen, by the names in `templates`. Collective.

        DTensors of a template are filled in place, as there. Of tensors for which `wants(name, path)` is false only
        the shape is given, on the meta device: another rank has use for them.
        """
        return self._reader.read(loaded, templates, wants)

    def _write(self, step: int, staged: Staged, extra: Callable[[], dict[str, Any]] | None, *, has_files: bool) -> None:
        """Write, agree, publish; raises on all ranks or on none."""
        folder = self.store.staging(step)
        try:
            files = self._disks.together(lambda: self._write_files(step, staged, folder, has_files=has_files))
            if self._disks.several:
                values = self._disks.everyone.on_main(lambda: {**self._extra(extra), SAVE: secrets.token_hex(8)})
                self._disks.together(lambda: self._ranks.on_main(lambda: self._publish(step, files, values)))
            else:
                self._ranks.on_main(lambda: self._publish(step, files, self._extra(extra)))
        finally:
            if self._ranks.is_main:
                self.store.discard_staging(step)

    def _write_files(self, step: int, staged: Staged, folder: Path, *, has_files: bool) -> dict[str, FileDigest]:
        if not has_files:
            self._ranks.on_main(lambda: self.store.stage(step))  # before any rank writes: it empties the directory
        items, places = self._plans.agree(staged)
        digest, pickled = self._ranks.all_or_none(
            lambda: write_items(self.store.staged(step), self._ranks.rank, items, places)
        )
        files = self._plans.write_index(folder, digest, pickled)
        return files | own_files.make_durable(step, self.store, self._ranks) if has_files else files

    def _extra(self, extra: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
        """On rank 0, at the last moment."""
        values = extra() if extra else {}
        if self._may_publish is not None and not self._may_publish():
            raise JobkitError("another attempt owns the run by now")
        return values

    def _publish(self, step: int, files: dict[str, FileDigest], extra: dict[str, Any]) -> None:
        self.store.publish(Manifest(step, self._disks.everyone.world_size, files, extra, self._owner))

    def _retain(self) -> None:
        if self._ranks.is_main:
            try:
                self.store.retain(self._keep)
            except OSError as error:
                log.warning("old checkpoints could not be removed: %s", error)
