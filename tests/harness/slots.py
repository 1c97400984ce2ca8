"""What stands for the parent of some ranks: it makes their slots, keeps them open, and lets the ranks have them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.ranks import Team
from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup
from jobkit.run.slots import environment_of, make_slots


@dataclass(frozen=True)
class Slots:
    """The slots of the ranks of one world, by rank; this process has them open as long as it likes."""

    of_rank: list[tuple[int, int]]
    parent: int

    def environment(self, rank: int) -> dict[str, str]:
        """As the parent hands them on; in a rank, which opens them by itself: its own parent is a server of tests."""
        return environment_of(
            [os.open(f"/proc/{self.parent}/fd/{file}", os.O_RDWR) for file in self.of_rank[rank]],
        )

    def only(self, ranks: Sequence[int]) -> Slots:
        return Slots([self.of_rank[rank] for rank in ranks], self.parent)

    def flip_a_byte(self, rank: int, slot: int, position: int = 5000) -> None:
        file = self.of_rank[rank][slot]
        (byte,) = os.pread(file, 1, position)
        os.pwrite(file, bytes([byte ^ 1]), position)

    def empty(self, rank: int) -> None:
        """As those of a parent that has just been started."""
        for file in self.of_rank[rank]:
            os.ftruncate(file, 0)

    @property
    def bytes_held(self) -> int:
        return sum(os.fstat(file).st_blocks * 512 for pair in self.of_rank for file in pair)


@contextmanager
def new_slots(ranks: int) -> Iterator[Slots]:
    made = [make_slots() for _ in range(ranks)]
    pairs = [pair for pair in made if pair is not None]
    assert len(pairs) == ranks
    try:
        yield Slots(pairs, os.getpid())
    finally:
        for pair in pairs:
            for file in pair:
                os.close(file)


def checkpointer_with(team: Team, slots: Slots, root: Path, ranks_per_node: int, **options: Any) -> Checkpointer:
    """A checkpointer of a rank of `on_ranks`, with its slots."""
    group = RankGroup.of(team.group)
    memory = SnapshotMemory.find(slots.environment(team.rank), group, ranks_per_node, **options)
    return Checkpointer(Store(root, missing_seconds=0.2), group, memory=memory, ranks_per_node=ranks_per_node)
