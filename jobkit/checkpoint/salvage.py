"""The newest snapshot in memory becomes a checkpoint on the disk, without the program, its objects or a device.

    slots of all ranks --records--> the newest that is whole --each shard, by a rank that has it--> Store.publish

A slot has a shard as the file has it, but for the order of header and data. worker/salvage.py calls this between two
attempts: the agents, and their memory, may soon be gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

from jobkit.checkpoint.memory import Record, Slot
from jobkit.checkpoint.reading import Damaged
from jobkit.checkpoint.shard import ShardInfo, write_parts
from jobkit.checkpoint.store import Manifest, Store
from jobkit.wire.group import RankGroup


def save_newest(
    slots: Sequence[int], ranks: RankGroup, store: Store, *, keep: int, check_lease: Callable[[], None]
) -> int | None:
    """Write the newest snapshot that the ranks have whole together; return its step. All ranks call it.

    None where there is none, or none newer than the newest checkpoint. It need not be of as many ranks as are here, or
    of these: a lost node's shards lie with its neighbour. Raises OSError, Damaged, LostLease and RankError.
    """
    held = {
        (record.step, record.attempt, record.world_size, record.rank): (slot, record)
        for slot in map(Slot, slots)
        for record in slot.records()
    }
    holders = ranks.gather(list(held))
    durable = ranks.broadcast(max(store.steps(), default=-1) if ranks.is_main else None)
    facts = set().union(*holders)
    states = {fact[:3] for fact in facts if fact[0] > durable}
    whole = [state for state in states if all((*state, rank) in facts for rank in range(state[2]))]
    if not whole:
        return None
    newest: tuple[int, int, int] = max(whole)

    def writer(rank: int) -> int:
        """Return who writes a shard: the rank itself, or the first that has a copy."""
        having = [number for number, present in enumerate(holders) if (*newest, rank) in present]
        return rank if rank in having else having[0]

    folder = ranks.on_main(lambda: store.begin(newest[0]))

    def write() -> list[Record]:
        mine = [held[*newest, rank] for rank in range(newest[2]) if writer(rank) == ranks.rank]
        for slot, record in mine:
            info, memory = ShardInfo.of_json(record.info), memoryview(slot.memory(slot.size))
            data = memory[record.begin : record.begin + info.size - info.header]
            header = os.pread(slot.descriptor, info.header, record.begin + len(data))
            if write_parts(folder / f"rank_{record.rank}.safetensors", header, data) != info:
                raise Damaged(f"rank {record.rank}'s part of the snapshot of step {record.step} is damaged")
        return [record for _, record in mine]

    def publish() -> None:
        check_lease()
        shards = {f"rank_{record.rank}.safetensors": ShardInfo.of_json(record.info) for record in records}
        first = records[0]  # rank 0's: it knows the place in the curves
        store.publish(
            folder,
            Manifest(
                step=first.step,
                world_size=first.world_size,
                shards=shards,
                entries=first.entries,
                extra=first.extra,
                pickled=sorted({path for record in records for path in record.pickled}),
            ),
        )
        best = store.best()
        store.trim(keep, () if best is None else (best[0],))

    try:
        written = ranks.gather(ranks.all_or_none(write))
        records = sorted((record for of_rank in written for record in of_rank), key=lambda record: record.rank)
        ranks.on_main(publish)
    except BaseException:
        if ranks.is_main:  # on a full disk the journal needs this room
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return newest[0]
