"""Snapshots in the host's memory, which outlive a rank: two memfds that the agent made, one written while the other is
good.

    slot: record page | header | data of this rank | data of the neighbour's rank
    take() -> copy into the slot that is not the newest complete one -> thread: sums, neighbour's copy -> record
    newest() -> what all ranks together have whole, newer than the disk

A record is written last, with its own checksum, so that a rank that is killed at any instant leaves the other slot
good. On several nodes each rank's data also lie on the next node. The checkpointer calls this.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from jobkit.checkpoint.free_memory import free_bytes
from jobkit.checkpoint.live import Entry
from jobkit.checkpoint.reading import Damaged, check_header
from jobkit.checkpoint.shard import ShardInfo, sums_of
from jobkit.checkpoint.sources import Source
from jobkit.checkpoint.staging import PAGE, Place, Staged, Stager
from jobkit.checkpoint.store import Manifest
from jobkit.group import RankGroup
from jobkit.log import log

RECORD = 64 << 10
"""Bytes of a slot's record; the shard lies after it."""

SHARE = 0.25
"""The most of a node's free memory that all slots of the node take."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The facts of a complete snapshot in a slot."""

    number: int
    """Counts the snapshots of an attempt."""
    step: int
    attempt: str
    world_size: int
    rank: int
    """Whose shard it is."""
    info: dict[str, Any]
    """Its ShardInfo."""
    begin: int
    """First byte of the data in the slot; the header lies after the data."""
    entries: list[str]
    extra: dict[str, Any]
    pickled: list[str]


def settled(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a save, with the results of futures among them."""
    return {name: value.result() if isinstance(value, Future) else value for name, value in extra.items()}


class Slot:
    """One memfd: a record page, and room that grows with the state."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def memory(self, size: int) -> mmap.mmap:
        """Return the slot's memory, at least so large; its pages exist."""
        if self._memory is None or len(self._memory) < size:
            if self.size < size:
                os.posix_fallocate(self.descriptor, 0, size)
            self._memory = mmap.mmap(self.descriptor, max(size, self.size), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self._memory

    def records(self) -> list[Record]:
        """Return the complete snapshots in the slot: this rank's, and the neighbour's."""
        if self.size < RECORD:
            return []
        head = os.pread(self.descriptor, RECORD, 0)
        length = int.from_bytes(head[:8], "little")
        text = head[16 : 16 + length]
        if not length or length > RECORD - 16 or xxhash.xxh3_64_digest(text) != head[8:16]:
            return []
        return [Record(**value) for value in json.loads(text)]

    def erase(self) -> None:
        """Make the slot's records invalid, before its data change."""
        if self.size >= RECORD:
            os.pwrite(self.descriptor, bytes(16), 0)

    def write(self, records: Sequence[Record]) -> None:
        """Make the slot's data valid."""
        text = json.dumps([vars(record) for record in records], separators=(",", ":")).encode()
        if len(text) > RECORD - 16:
            raise ValueError(f"the record of a snapshot has {len(text)} bytes")
        os.pwrite(self.descriptor, text, 16)
        os.pwrite(self.descriptor, len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text), 0)


class SlotShard:
    """A shard in a slot, or in a buffer, to be read: its data, and the header after them."""

    def __init__(self, memory: memoryview, info: ShardInfo) -> None:
        self._data, self._info = memory, info

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        position = offset - self._info.header
        for buffer in buffers:
            buffer[:] = self._data[position : position + len(buffer)]
            position += len(buffer)
        return position + self._info.header - offset

    def close(self) -> None:
        return

    @property
    def header(self) -> bytes:
        size = self._info.size - self._info.header
        return bytes(self._data[size : size + self._info.header])


class Snapshots:
    """The snapshots of one rank. `slots` are its two memfds; None where no agent made any."""

    def __init__(self, slots: tuple[int, int] | None, stager: Stager, place: Place, ranks: RankGroup) -> None:
        self._slots = None if slots is None else tuple(map(Slot, slots))
        self._stager, self._place, self._ranks = stager, place, ranks
        self.complete = 0
        """The number of the newest snapshot that is complete on this rank, its neighbour's copy included."""
        self.step: int | None = None
        """The step of that snapshot."""
        self._number = 0
        self._first = 0
        """The slot of snapshot 1: the other one may hold the last good one of the attempt before."""
        self._future: Future[None] | None = None
        self._refused: set[int] = set()

    @property
    def is_on(self) -> bool:
        return self._slots is not None

    @property
    def _nodes(self) -> int:
        return self._place.world_size // self._place.local_world_size

    # Taking

    def take(
        self,
        step: int,
        entries: Sequence[Entry],
        extra: dict[str, Any],
        least_complete: int,
        writers: ThreadPoolExecutor,
    ) -> float | None:
        """Copy the state into a slot; returns the seconds that the loop waited, None if the snapshot was skipped.

        All ranks call it with the same `least_complete`, the least of their `complete`. It is skipped while a rank
        still completes the one before: the newest complete one must stay, and there are two slots.
        """
        if self._slots is None or least_complete < self._number:
            return None
        if self._future is not None:
            self._future.result()  # raises the error of the thread
        began = time.monotonic()
        size = self._stager.size(entries)
        slot = self._slots[(self._first + self._number) % 2]
        room = RECORD + (size + (1 << 20)) * (2 if self._nodes > 1 else 1)
        if self._ranks_have_no_room(room):
            self._slots = None
            return None
        self._number += 1
        number = self._number
        slot.erase()
        memory = torch.frombuffer(slot.memory(room), dtype=torch.uint8)
        staged = self._stager.stage(entries, into=memory[RECORD:])
        seconds = time.monotonic() - began
        names = [entry.name for entry in entries]
        self._future = writers.submit(self._complete, slot, staged, number, step, names, extra)
        return seconds

    def _ranks_have_no_room(self, room: int) -> bool:
        """True on all ranks if on any the slots would take too much of the node's free memory."""
        assert self._slots is not None
        present = sum(slot.size for slot in self._slots)
        grows = self._slots[(self._first + self._number) % 2].size < room
        needed = (2 * room - present) * self._place.local_world_size
        lacks = grows and needed > SHARE * free_bytes()
        if self._stager.ranks.anywhere(lacks):
            if self._stager.ranks.is_main:
                log.warning("no snapshots in memory: they would take more than a quarter of the free memory of a node")
            return True
        return False

    def _complete(
        self, slot: Slot, staged: Staged, number: int, step: int, entries: list[str], extra: dict[str, Any]
    ) -> None:
        """In the thread: checksums, the neighbour's copy, and last the record."""
        if staged.ready is not None:
            staged.ready.synchronize()
        info = sums_of(staged)
        memory = memoryview(slot.memory(0))
        end = RECORD + staged.nbytes + len(staged.header)
        memory[RECORD + staged.nbytes : end] = staged.header
        mine = Record(
            number=number,
            step=step,
            attempt=self._attempt,
            world_size=self._place.world_size,
            rank=self._place.rank,
            info=info.as_json(),
            begin=RECORD,
            entries=entries,
            extra=settled(extra),
            pickled=staged.pickled,
        )
        records = [mine]
        if self._nodes > 1:
            records.append(self._exchange(slot, mine, end))
        slot.write(records)
        self.complete, self.step = number, step

    @property
    def _attempt(self) -> str:
        return os.environ.get("JOBKIT_ATTEMPT", "")

    def _exchange(self, slot: Slot, mine: Record, end: int) -> Record:
        """Send this rank's shard to the next node, and keep the one that comes from the node before."""
        by = self._place.local_world_size
        text = json.dumps(vars(mine)).encode()
        other = self._ranks.shift(torch.frombuffer(bytearray(text), dtype=torch.uint8), by)
        theirs = Record(**json.loads(other.numpy().tobytes()))
        begin = -(-end // PAGE) * PAGE
        memory = torch.frombuffer(slot.memory(begin + theirs.info["size"]), dtype=torch.uint8)
        self._ranks.shift(memory[RECORD:end], by, into=memory[begin : begin + theirs.info["size"]])
        return Record(**{**vars(theirs), "begin": begin})

    # Restoring

    def newest(self, after: int | None) -> Source | None:
        """Return the newest snapshot that the ranks have whole, if it is newer than `after`. All ranks call it.

        On another number of ranks there is none: the disk's checkpoint serves any number.
        """
        present = {} if self._slots is None else self._records()
        facts = [(step, rank) for step, rank in present if step not in self._refused]
        holders = self._stager.ranks.gather(facts)
        ranks = range(self._place.world_size)
        steps = {step for facts in holders for step, _ in facts}
        whole = [step for step in steps if all(any((step, rank) in facts for facts in holders) for rank in ranks)]
        newest = max((step for step in whole if step > (-1 if after is None else after)), default=None)
        self._first = 0
        if newest is None:
            return None
        if self._slots is not None:
            keeps = [any(record.step == newest for record in slot.records()) for slot in self._slots]
            self._first = 1 if keeps[0] else 0
        return self._source(newest, after, present, holders)

    def _records(self) -> dict[tuple[int, int], tuple[Slot, Record]]:
        assert self._slots is not None
        return {
            (record.step, record.rank): (slot, record)
            for slot in self._slots
            for record in slot.records()
            if record.world_size == self._place.world_size
        }

    def _source(
        self,
        step: int,
        after: int | None,
        present: dict[tuple[int, int], tuple[Slot, Record]],
        holders: Sequence[Sequence[tuple[int, int]]],
    ) -> Source | None:
        """Bring each rank's shard to it, and return the snapshot as a source. None where a header is damaged."""
        ranks, here = self._stager.ranks, self._place.rank
        shard: SlotShard | None = None
        for rank in range(self._place.world_size):
            if (step, rank) in holders[rank]:
                continue
            giver = next(number for number, facts in enumerate(holders) if (step, rank) in facts)
            if here == giver:
                slot, record = present[step, rank]
                text = json.dumps(vars(record)).encode()
                ranks.send(torch.frombuffer(bytearray(text).ljust(RECORD), dtype=torch.uint8), rank)
                data = memoryview(slot.memory(slot.size))[record.begin : record.begin + record.info["size"]]
                ranks.send(torch.frombuffer(data, dtype=torch.uint8), rank)
            elif here == rank:
                head = torch.empty(RECORD, dtype=torch.uint8)
                ranks.receive(head, giver)
                record = Record(**json.loads(head.numpy().tobytes().rstrip(b" ")))
                content = torch.empty(record.info["size"], dtype=torch.uint8)
                ranks.receive(content, giver)
                shard = SlotShard(content.numpy().data, ShardInfo.of_json(record.info))
        if shard is None:
            slot, record = present[step, here]
            info = ShardInfo.of_json(record.info)
            data = memoryview(slot.memory(slot.size))[record.begin : record.begin + info.size]
            shard = SlotShard(data, info)
        info = ShardInfo.of_json(record.info)
        header: bytes | None = shard.header
        try:
            check_header(f"snapshot of step {step}", info, shard.header)
        except Damaged:
            header = None
        facts = ranks.gather((info, header, record.pickled))
        if any(fact[1] is None for fact in facts):
            self._refused.add(step)
            return self.newest(after)
        name = "rank_{}.safetensors".format
        manifest = Manifest(
            step=step,
            world_size=self._place.world_size,
            shards={name(rank): fact[0] for rank, fact in enumerate(facts)},
            entries=record.entries,
            extra=ranks.broadcast(record.extra),
            pickled=sorted({path for fact in facts for path in fact[2]}),
        )
        return Source(
            manifest,
            {name(rank): fact[1] for rank, fact in enumerate(facts)},
            lambda _: shard,
            "memory",
            local=frozenset([name(here)]),
        )

    def wait(self) -> None:
        """Return when the snapshot that was taken last is complete on this rank."""
        if self._future is not None:
            self._future.result()

    def refuse(self, step: int) -> None:
        """Take a snapshot for no good from now on: it did not verify."""
        self._refused.add(step)

    def end_restore(self) -> None:
        """Count the snapshots of this attempt from here on."""
        self._number = self.complete = 0
