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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
import xxhash

from jobkit.checkpoint.free_memory import free_bytes
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.reading import Damaged, ShardFile, check_header
from jobkit.checkpoint.shard import ShardInfo, sums_of
from jobkit.checkpoint.sources import Source
from jobkit.checkpoint.staging import PAGE, RankPosition, Staged, Stager
from jobkit.checkpoint.store import Manifest
from jobkit.log import log
from jobkit.wire.group import RankGroup

RECORD = 1 << 20
"""Bytes of a slot's record, 16 of which are the checksum of 4 MiB of state; the shard lies after it."""

GROWTH = 4 << 20
"""A slot grows by so many bytes at least, as with a list that becomes longer: new memory is slow."""

SHARE = 0.25
"""The most of a node's free memory that all slots of the node take."""

_CUDA: Any = torch.cuda  # cudart has no types


@dataclass(frozen=True, kw_only=True)
class Record:
    """The facts of a complete snapshot in a slot."""

    step: int
    attempt: int
    """Two attempts may have a snapshot of one step each: their shards do not go together."""
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


Fact = tuple[int, int, int]
"""(step, attempt, rank) of a record."""


def with_results(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a save, with the results of futures among them."""
    return {name: value.result() if isinstance(value, Future) else value for name, value in extra.items()}


class Slot:
    """One memfd: a record page, and room that grows with the state."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._pinned: int | None = None
        """The address of the memory, where it is pinned."""

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def memory(self, size: int, *, pin: bool = False) -> mmap.mmap:
        """Return the slot's memory, at least so large; its pages exist. Pinned, it takes copies from a GPU that the
        loop need not wait for."""
        if self._memory is None or len(self._memory) < size:
            if self.size < size:
                os.posix_fallocate(self.descriptor, 0, size)
            if self._pinned is not None:
                _CUDA.check_error(_CUDA.cudart().cudaHostUnregister(self._pinned))
                self._pinned = None
            self._memory = mmap.mmap(self.descriptor, max(size, self.size), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if pin and self._pinned is None:
            self._pinned = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            _CUDA.check_error(_CUDA.cudart().cudaHostRegister(self._pinned, len(self._memory), 0))
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


class Snapshots:
    """The snapshots of one rank. `slots` are its two memfds; None where no agent made any."""

    def __init__(
        self,
        slots: tuple[int, int] | None,
        stager: Stager,
        position: RankPosition,
        ranks: RankGroup,
        attempt: int,
        note: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`note` hears the step of each snapshot that is complete on this rank."""
        self._slots = None if slots is None else tuple(map(Slot, slots))
        self._stager, self._position, self._ranks, self._attempt = stager, position, ranks, attempt
        self._note = note
        self.complete = 0
        """The number of the newest snapshot that is complete on this rank, its neighbour's copy included."""
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
        return self._position.world_size // self._position.local_world_size

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
        if self._future is not None and self._future.done():
            self._future.result()  # raises the error of the thread
        if self._slots is None or least_complete < self._number:
            return None
        began = time.monotonic()
        slot = self._slots[(self._first + self._number) % 2]

        def memory(data: int, header: int) -> torch.Tensor | None:
            room = RECORD + (data + header) * (2 if self._nodes > 1 else 1)
            room += -room % GROWTH
            if self._ranks_have_no_room(room):
                return None
            slot.erase()
            return torch.frombuffer(slot.memory(room, pin=self._stager.has_cuda), dtype=torch.uint8)[RECORD:]

        staged = self._stager.stage_into(entries, memory)
        if staged is None:
            self._slots = None
            return None
        self._number += 1
        number = self._number
        seconds = time.monotonic() - began
        names = [entry.name for entry in entries]
        self._future = writers.submit(self._complete, slot, staged, number, step, names, extra)
        return seconds

    def _ranks_have_no_room(self, room: int) -> bool:
        """True on all ranks if on any the slots would take too much of the node's free memory."""
        assert self._slots is not None
        present = sum(slot.size for slot in self._slots)
        grows = self._slots[(self._first + self._number) % 2].size < room
        needed = (2 * room - present) * self._position.local_world_size
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
        staged.wait()
        info = sums_of(staged.header, staged.data.numpy().data)
        memory = memoryview(slot.memory(0))
        end = RECORD + staged.nbytes + len(staged.header)
        memory[RECORD + staged.nbytes : end] = staged.header
        mine = Record(
            step=step,
            attempt=self._attempt,
            world_size=self._position.world_size,
            rank=self._position.rank,
            info=info.as_json(),
            begin=RECORD,
            entries=entries,
            extra=with_results(extra),
            pickled=staged.pickled,
        )
        records = [mine]
        if self._nodes > 1:
            records.append(self._exchange(slot, mine, end))
        slot.write(records)
        self._note(step)
        self.complete = number

    def _exchange(self, slot: Slot, mine: Record, end: int) -> Record:
        """Send this rank's shard to the next node, and keep the one that comes from the node before."""
        by = self._position.local_world_size
        text = json.dumps(vars(mine)).encode()
        other = self._ranks.shift(torch.frombuffer(bytearray(text), dtype=torch.uint8), by)
        theirs = Record(**json.loads(other.numpy().tobytes()))
        begin = -(-end // PAGE) * PAGE
        memory = torch.frombuffer(slot.memory(begin + theirs.info["size"]), dtype=torch.uint8)
        self._ranks.shift(memory[RECORD:end], by, into=memory[begin : begin + theirs.info["size"]])
        return Record(**{**vars(theirs), "begin": begin})

    # Restoring

    def newest(self, after: int | None, before: int | None = None) -> Source | None:
        """Return the newest snapshot that the ranks have whole, between two steps if given. All ranks call it.

        On another number of ranks there is none: the disk's checkpoint serves any number.
        """
        present = {} if self._slots is None else self._records()
        facts = [fact for fact in present if fact[0] not in self._refused and (before is None or fact[0] < before)]
        holders = self._stager.ranks.gather(facts)
        ranks = range(self._position.world_size)
        states = {fact[:2] for facts in holders for fact in facts}
        whole = [state for state in states if all(any((*state, rank) in facts for facts in holders) for rank in ranks)]
        newest = max((state for state in whole if state[0] > (-1 if after is None else after)), default=None)
        self._first = 0
        if newest is None:
            return None
        if self._slots is not None:
            keeps = [any((record.step, record.attempt) == newest for record in slot.records()) for slot in self._slots]
            self._first = 1 if keeps[0] else 0
        return self._source(newest, present, holders) or self.newest(after, before)

    def _records(self) -> dict[Fact, tuple[Slot, Record]]:
        assert self._slots is not None
        return {
            (record.step, record.attempt, record.rank): (slot, record)
            for slot in self._slots
            for record in slot.records()
            if record.world_size == self._position.world_size
        }

    def _source(
        self,
        state: tuple[int, int],
        present: dict[Fact, tuple[Slot, Record]],
        holders: Sequence[Sequence[Fact]],
    ) -> Source | None:
        """Bring each rank's shard to it, and return the snapshot as a source. None where a header is damaged."""
        ranks, own_rank, step = self._stager.ranks, self._position.rank, state[0]
        if (mine := present.get((*state, own_rank))) is not None:
            slot, record = mine
            file = FileIO(slot.descriptor, closefd=False)
        for rank in range(self._position.world_size):
            if (*state, rank) in holders[rank]:
                continue
            giver = next(number for number, facts in enumerate(holders) if (*state, rank) in facts)
            if own_rank == giver:
                slot, theirs = present[state[0], state[1], rank]
                text = json.dumps(vars(theirs)).encode()
                ranks.send(torch.frombuffer(bytearray(text).ljust(RECORD), dtype=torch.uint8), rank)
                data = memoryview(slot.memory(slot.size))[theirs.begin : theirs.begin + theirs.info["size"]]
                ranks.send(torch.frombuffer(data, dtype=torch.uint8), rank)
            elif own_rank == rank:
                head = torch.empty(RECORD, dtype=torch.uint8)
                ranks.receive(head, giver)
                record = Record(**{**json.loads(head.numpy().tobytes().rstrip(b" ")), "begin": 0})
                file = FileIO(os.memfd_create("jobkit-snapshot"), "r+")
                memory = Slot(file.fileno()).memory(record.info["size"])
                ranks.receive(torch.frombuffer(memory, dtype=torch.uint8), giver)
        info = ShardInfo.of_json(record.info)
        header: bytes | None = os.pread(file.fileno(), info.header, record.begin + info.size - info.header)
        try:
            check_header(f"snapshot of step {step}", info, header or b"")
        except Damaged:
            header = None
        facts = ranks.gather((info, header, record.pickled))
        if any(fact[1] is None for fact in facts):
            self._refused.add(step)
            return None
        name = "rank_{}.safetensors".format
        manifest = Manifest(
            step=step,
            world_size=self._position.world_size,
            shards={name(rank): fact[0] for rank, fact in enumerate(facts)},
            entries=record.entries,
            extra=ranks.broadcast(record.extra),
            pickled=sorted({path for fact in facts for path in fact[2]}),
        )
        return Source(
            manifest,
            {name(rank): fact[1] for rank, fact in enumerate(facts)},
            lambda _: nullcontext(ShardFile(file, record.begin)),
            "memory",
            local=frozenset([name(own_rank)]),
        )

    def wait(self) -> None:
        """Return when the snapshot that was taken last is complete on this rank."""
        if self._future is not None:
            self._future.result()

    def refuse(self, step: int) -> None:
        """Take a snapshot for no good from now on: it did not verify."""
        self._refused.add(step)
        for slot in self._slots or ():
            if any(record.step == step for record in slot.records()):
                slot.erase()

    def end_restore(self) -> None:
        """Count the snapshots of this attempt from here on."""
        self._number = self.complete = 0
