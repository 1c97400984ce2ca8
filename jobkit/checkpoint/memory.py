"""Snapshots in memory: what the ranks of an attempt leave in their slots, and what those of the next find there."""

from __future__ import annotations

import pickle
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from jobkit.checkpoint.free_memory import free_bytes
from jobkit.checkpoint.slot import DATA_AT, Contents, DamagedSlot, Part, Slot, SnapshotId
from jobkit.checkpoint.staging import HostBuffers, NoRoom, Staged
from jobkit.checkpoint.storage import Extent, raw
from jobkit.errors import CheckpointError
from jobkit.group import RankGroup
from jobkit.run.slots import find_slots

SHARE = 0.25
"""Of the host memory that is free, what the snapshots of a node may take: the rest is for data loaders, which grow."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that all ranks have verified together."""

    contents: Contents
    """As rank 0 of those that have it describes it; its parts are in `found`."""
    found: list[tuple[int, Part]]
    """The parts, each with the rank in whose slot it is."""
    slot: Slot | None
    """This rank's, where it has some of it."""


class SnapshotMemory:
    """The two slots of this rank; `ranks` are the checkpointer's. To make it is collective; what else is says so.

    Of the two one always holds a snapshot that all ranks have, once there is one: a slot is taken for the next only
    when every rank has said that the other is complete.

    Args:
        trained: the last attempt before this one that began to train: what older ones left is of another past.
    """

    def __init__(
        self,
        slots: tuple[Slot, Slot],
        ranks: RankGroup,
        ranks_per_node: int,
        *,
        run: str = "",
        attempt: int = 0,
        trained: int = 0,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self.refused: list[tuple[int, str]] = []
        """The snapshots that could not be used, as (step, reason)."""
        self.is_on = True
        """Whether snapshots are taken; off once there is no room for them."""
        self._slots, self._ranks, self._ranks_per_node = slots, ranks, ranks_per_node
        self._buffers = [HostBuffers(self._block(slot)) for slot in slots]
        self._run, self._attempt, self._free = run, attempt, free
        self._timeline, self._trained = ranks.broadcast((uuid.uuid4().hex, trained))
        self._complete: int | None = None
        """The slot whose snapshot all ranks have."""
        self._next = 0
        self._number = 0
        self._candidates: list[SnapshotId] | None = None

    @classmethod
    def find(
        cls, environ: Mapping[str, str], ranks: RankGroup, ranks_per_node: int, **options: Any
    ) -> SnapshotMemory | None:
        """That of the slots that the environment names; None where a rank has none. Collective."""
        files = find_slots(environ)
        if not all(ranks.gather(files is not None)) or files is None:
            return None
        return cls((Slot(files[0]), Slot(files[1])), ranks, ranks_per_node, **options)

    # Taking one

    def begin(self) -> HostBuffers:
        """Where the next snapshot is to be staged; what was there is gone."""
        self._next = 1 - self._complete if self._complete is not None else 0
        self._number += 1
        self._slots[self._next].invalidate()
        return self._buffers[self._next]

    def _block(self, slot: Slot) -> Callable[[int, torch.device | None], torch.Tensor]:
        def block(size: int, device: torch.device | None) -> torch.Tensor:
            self._check_room(size)
            try:
                return slot.map_data(size, device)
            except OSError as error:  # as with a limit for the size of files, which these are
                raise NoRoom(f"{size >> 20} MiB of them: {error.strerror}") from error

        return block

    def _check_room(self, size: int) -> None:
        """Raise NoRoom where two snapshots of that size a rank would take more than SHARE of what is free here."""
        held = sum(slot.bytes_held for slot in self._slots) * self._ranks_per_node
        needed, free = 2 * size * self._ranks_per_node, self._free() + held
        if needed > SHARE * free:
            raise NoRoom(f"they need {needed >> 20} MiB a node and may take {SHARE:.0%} of the {free >> 20} MiB free")

    def complete(self, staged: Staged, step: int, extra: Callable[[], dict[str, Any]] | None) -> None:
        """Make what was staged after `begin` the newest snapshot, on all ranks or on none. Collective.

        Raises CheckpointError on all ranks where one cannot; `is_on` is off from then on where there is no room.
        """
        slot, id = self._slots[self._next], SnapshotId(step, self._timeline, self._number)
        self._ranks.all_or_none(lambda: _check(staged))
        own = None if staged.no_room else _part_of(self._ranks.rank, staged, slot)
        sent = None if own is None else _part_for_neighbour(own, staged)
        self._agree_on_room(staged, slot, sent)
        assert own is not None and sent is not None
        described = self._ranks.on_main(extra if extra is not None else dict)
        self._ranks.all_or_none(
            lambda: slot.publish(
                Contents(id, self._run, self._ranks.world_size, described, self._parts(own, sent, slot))
            )
        )
        self._complete = self._next
        self._prepare(staged)

    def _agree_on_room(self, staged: Staged, slot: Slot, sent: Part | None) -> None:
        lengths = self._ranks.gather(sent.length if sent is not None else 0)
        reason = staged.no_room
        if reason is None:
            try:
                self._check_room(slot.data.numel() + (lengths[self._before] if self._has_neighbour else 0))
                if self._has_neighbour:  # here, where all can agree: one that fails later leaves the others waiting
                    slot.map_guest(lengths[self._before])
            except (NoRoom, OSError) as error:
                reason = str(error)
        reasons = [reason for reason in self._ranks.gather(reason) if reason is not None]
        if reasons:
            self.is_on = False
            raise CheckpointError(f"{reasons[0]}; none in this attempt")

    @property
    def _has_neighbour(self) -> bool:
        return self._ranks_per_node < self._ranks.world_size

    @property
    def _before(self) -> int:
        """The rank of the node before this one that sends its part here."""
        return (self._ranks.rank - self._ranks_per_node) % self._ranks.world_size

    def _parts(self, own: Part, sent: Part, slot: Slot) -> list[Part]:
        """The rank's own part and, of a rank on the node before, what no other node has: with checksums."""
        parts = [replace(own, crc32=zlib.crc32(raw(slot.data)))]
        if self._has_neighbour:
            parts.append(self._exchange(sent, slot))
        return parts

    def _exchange(self, sent: Part, slot: Slot) -> Part:
        described = self._ranks.shift(_as_tensor(pickle.dumps(sent)), self._ranks_per_node)
        guest: Part = pickle.loads(raw(described))
        memory = slot.map_guest(guest.length)
        self._ranks.shift(slot.data[sent.start - DATA_AT :], self._ranks_per_node, memory)
        moved = slot.guest_at - guest.start
        return replace(
            guest,
            tensors=[(item, replace(extent, offset=extent.offset + moved)) for item, extent in guest.tensors],
            start=slot.guest_at,
            crc32=zlib.crc32(raw(memory)),
        )

    def _prepare(self, staged: Staged) -> None:
        """Have the memory of the other slot before the loop needs it."""
        with suppress(NoRoom):  # the next snapshot will say so
            self._buffers[1 - self._next].lay_out(staged.layout, staged.device)

    def release(self) -> None:
        """Give the memory back: when no more are taken, and nobody reads what was staged there."""
        self._complete = None
        self._buffers = [HostBuffers(), HostBuffers()]
        for slot in self._slots:
            slot.release()

    # Finding one

    def newest(self, at_least: int) -> Snapshot | None:
        """The newest snapshot of at least so many steps that is whole and verified, or None. Collective."""
        if self._candidates is None:
            self._candidates = self._find_candidates()
        while self._candidates and self._candidates[0].step >= at_least:
            id = self._candidates.pop(0)
            reports = self._ranks.gather(self._verified(id))
            found = [(rank, part) for rank, (_, parts, _) in enumerate(reports) for part in parts]
            contents = next(one for one, *_ in reports if one is not None)
            problems = [problem for *_, more in reports for problem in more]
            lacking = _lacking(contents.world_size, found)
            if lacking is None:
                return Snapshot(contents, found, self._slot_of(id))
            self.refused.append((id.step, "; ".join([*problems, lacking])))
        return None

    def _find_candidates(self) -> list[SnapshotId]:
        """The snapshots of the newest past that any rank has, newest first: a node that was away may have another."""
        owners = [owner for slot in self._slots if (owner := slot.owner) is not None]
        mine, damaged = [], []
        for slot in self._slots:
            try:
                if (contents := slot.contents()) is not None and contents.run == self._run:
                    mine.append(contents.id)
            except DamagedSlot as error:
                damaged.append((error.step, f"what rank {self._ranks.rank} says of it does not match its checksum"))
        found = self._ranks.gather((max(owners, default=-1), mine, damaged))
        newest = max(self._trained, *(owner for owner, *_ in found))
        ids = {id for owner, ids, _ in found if owner == newest for id in ids}
        left = {id.step for _, ids, _ in found for id in ids} - {id.step for id in ids}
        self.refused += [one for *_, more in found for one in more]
        self.refused += [(step, "the run has gone on without it") for step in sorted(left, reverse=True)]
        return sorted(ids, key=lambda id: (id.step, id.number, id.timeline), reverse=True)

    def _slot_of(self, id: SnapshotId) -> Slot | None:
        for slot in self._slots:
            with suppress(DamagedSlot):
                if (contents := slot.contents()) is not None and contents.id == id:
                    return slot
        return None

    def _verified(self, id: SnapshotId) -> tuple[Contents | None, list[Part], list[str]]:
        """What this rank has of a snapshot: what it says of it, the parts that are good, what is wrong with others."""
        slot = self._slot_of(id)
        contents = slot.contents() if slot is not None else None
        if slot is None or contents is None:
            return None, [], []
        problems = {part.rank: problem for part in contents.parts if (problem := slot.problem(part)) is not None}
        good = [part for part in contents.parts if part.rank not in problems]
        return replace(contents, parts=[]), good, list(problems.values())

    def keep(self, snapshot: Snapshot | None) -> None:
        """The attempt begins with this one, or from elsewhere: no other will ever be chosen."""
        self._complete = None
        for number, slot in enumerate(self._slots):
            if snapshot is not None and slot is snapshot.slot:
                self._complete = number
            else:
                slot.invalidate()
            slot.set_owner(self._attempt)


def _part_of(rank: int, staged: Staged, slot: Slot) -> Part:
    base = slot.data.data_ptr()
    tensors, pickled = [], []
    for item, value in staged.items:
        if isinstance(value, bytes):
            pickled.append((item, value))
        else:
            offset = DATA_AT + (value.data_ptr() - base if value.numel() else 0)
            tensors.append((item, Extent("", offset, value.nbytes, tuple(value.shape), value.dtype)))
    return Part(rank, staged.keys, tensors, pickled, start=DATA_AT, length=slot.data.numel())


def _check(staged: Staged) -> None:
    if staged.problem is not None:
        raise CheckpointError(staged.problem)


def _part_for_neighbour(own: Part, staged: Staged) -> Part:
    """What is not on every node: the tensors that were staged last, and all that is pickled, which is small."""
    names = set(staged.own)
    tensors = [(item, extent) for item, extent in own.tensors if item.index.fqn in names]
    end = own.start + own.length
    start = min((extent.offset for _, extent in tensors if extent.length), default=end)
    return replace(own, tensors=tensors, start=start, length=end - start)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _lacking(world_size: int, found: list[tuple[int, Part]]) -> str | None:
    """What a snapshot lacks: a part of a rank that took it, or of a tensor; None where it is whole."""
    parts = [part for _, part in found]
    gone = sorted(set(range(world_size)) - {part.rank for part in parts})
    if gone:
        return f"nobody has what rank {', '.join(map(str, gone))} left"
    there = {item.index.fqn for part in parts for item, _ in part.pickled}
    chunks = {item.index: item.tensor_data for part in parts for item, _ in part.tensors}
    sizes: Counter[str] = Counter()
    for index, data in chunks.items():
        assert data is not None
        sizes[index.fqn] += prod(data.chunk.sizes)
        if sizes[index.fqn] == prod(data.size):
            there.add(index.fqn)
    missing = sorted({key for part in parts for key in part.keys} - there)
    return f"nobody has all of {missing[0]}" if missing else None
