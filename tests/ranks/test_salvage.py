"""The newest snapshot in memory becomes a checkpoint, by ranks that know nothing of the program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from torch import Tensor

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.memory import RECORD, Slot
from jobkit.checkpoint.reading import Damaged
from jobkit.checkpoint.salvage import save_newest
from jobkit.checkpoint.staging import RankPosition
from jobkit.checkpoint.store import Store
from jobkit.errors import LostLease
from jobkit.wire.group import RankError, RankGroup

SIZE = 3 << 19
"""Elements of a tensor that three ranks divide: each has several blocks of 4 MiB, and not a whole number of them."""


class Plain:
    """Tensors, and a value that has to be pickled."""

    def __init__(self, step: int, rank: int | None = None) -> None:
        number = step * 100 + (rank or 0)
        self.value: dict[str, Any] = {
            "large": torch.arange(SIZE, dtype=torch.float64) + number,
            "odd": torch.full((7,), number, dtype=torch.bfloat16),
            "plain": {("a", number), (1.5, number)},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state

    def equals(self, other: Plain) -> bool:
        return all(
            value.equal(other.value[name]) if isinstance(value, Tensor) else value == other.value[name]
            for name, value in self.value.items()
        )


def entries(shared: Plain, own: Plain) -> list[Entry]:
    return [Entry(name="shared", live=shared), Entry(name="own", live=own, scope="rank")]


def make(ranks: RankGroup, folder: Path, attempt: int, slots: Any = None, each: int = 0) -> Checkpointer:
    place = RankPosition(ranks.rank, ranks.world_size, each or ranks.world_size)
    return Checkpointer(folder, ranks, place, attempt=attempt, keep=2, slots=slots)


def train(ranks: RankGroup, folder: Path, slots: list[tuple[int, int]], each: int) -> None:
    """Checkpoints of steps 1 and 2, snapshots of steps 3 and 4."""
    checkpointer = make(ranks, folder, 1, slots[ranks.rank], each)
    for step in (1, 2, 3, 4):
        state, extra = entries(Plain(step), Plain(step, ranks.rank)), {"at": (step, ranks.rank)}
        if step < 3:
            checkpointer.write(checkpointer.copy_to_host(step, state, extra), wait=True)
        else:
            least = int(-ranks.maximum(-checkpointer.snapshots.complete)[0])
            assert checkpointer.snapshot(step, state, extra, least) is not None
            checkpointer.snapshots.wait()
            ranks.barrier()
    checkpointer.close()


def salvage(ranks: RankGroup, folder: Path, slots: list[tuple[int, int]], lease: bool = True) -> int | str | None:
    """Return the step that was saved, or the error."""

    def check_lease() -> None:
        if not lease:
            raise LostLease("another attempt")

    store = Store(folder, "1.memory")
    try:
        return save_newest(slots[ranks.rank], ranks, store, keep=2, check_lease=check_lease)
    except (Damaged, LostLease, RankError) as error:
        return str(error)


def restore(ranks: RankGroup, folder: Path) -> tuple[int, Any, bool]:
    """Return the step, the extra values, and whether the state is the one of that step."""
    shared, own = Plain(0), Plain(0)
    checkpointer = make(ranks, folder, 2)
    assert checkpointer.restored is not None and checkpointer.restored.where == "disk"
    step, extra = checkpointer.restored.step, checkpointer.restored.manifest.extra
    checkpointer.restore(entries(shared, own))
    assert checkpointer.set_aside == []
    return step, extra["at"], shared.equals(Plain(step)) and own.equals(Plain(step, ranks.rank))


def memory(count: int) -> list[tuple[int, int]]:
    return [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "each", "left"),
    [
        (1, 1, [0]),
        (3, 3, [0, 1, 2]),
        (3, 1, [0, 2]),  # the second node is lost, and the third has a copy of its rank's
        (4, 2, [2, 3, None, None]),  # the first node is lost, and a spare has taken its place, with other ranks
        (4, 2, [0, 1]),  # none has
    ],
)
def test_the_newest_snapshot_is_a_checkpoint_that_any_start_takes_up(
    tmp_path: Path, count: int, each: int, left: list[int | None]
) -> None:
    slots = memory(count)
    run_ranks(train, count, tmp_path, slots, each)
    present = [memory(1)[0] if rank is None else slots[rank] for rank in left]
    assert run_ranks(salvage, len(left), tmp_path, present) == [4] * len(left)
    assert run_ranks(restore, count, tmp_path) == [(4, [4, 0], True)] * count
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000004"]
    assert (tmp_path / "latest").resolve().name == "step_00000004"
    assert run_ranks(salvage, len(left), tmp_path, present) == [None] * len(left), "the checkpoint is as new"


def test_a_part_that_nobody_has_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    slots = memory(3)
    run_ranks(train, 3, tmp_path, slots, 1)
    assert run_ranks(salvage, 1, tmp_path, [slots[1]]) == [None]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]


@pytest.mark.parametrize(("fault", "at"), [("a damaged block", -1), ("a damaged header", 20), ("a lost lease", 0)])
def test_a_snapshot_that_may_not_be_saved_changes_nothing(tmp_path: Path, fault: str, at: int) -> None:
    count = 1 if fault == "a lost lease" else 2  # that ends a rank at once, and its agent ends the others
    slots = memory(count)
    run_ranks(train, count, tmp_path, slots, count)
    slot, record = next((Slot(n), r) for n in slots[-1] for r in Slot(n).records() if r.step == 4)
    if at:
        os.pwrite(slot.descriptor, b"?", RECORD + record.info["size"] - record.info["header"] + at)
    answers = run_ranks(salvage, count, tmp_path, slots, fault != "a lost lease")
    assert all(isinstance(answer, str) for answer in answers), answers
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]
    assert run_ranks(restore, count, tmp_path) == [(2, [2, 0], True)] * count


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    slots = memory(1)
    run_ranks(train, 1, tmp_path, slots, 1)
    Store(tmp_path, "1").mark_best(1, 0.5)
    assert run_ranks(salvage, 1, tmp_path, slots) == [4]
    assert {"step_00000001", "step_00000004"} < {file.name for file in tmp_path.iterdir()}
