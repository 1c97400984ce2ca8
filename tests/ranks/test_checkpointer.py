"""Saving and restoring on several ranks, on other numbers of ranks, from damaged files and from memory."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn

from jobkit.checkpoint import memory
from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.memory import RECORD
from jobkit.checkpoint.staging import RankPosition
from jobkit.errors import CheckpointError, UsageError
from jobkit.wire.group import RankGroup


class Own:
    """A state of each rank alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def entries(model: nn.Module, optimizer: torch.optim.Optimizer, mine: Own) -> list[Entry]:
    return [
        Entry(name="model", live=model),
        Entry(name="optimizer", live=optimizer),
        Entry(name="own", live=mine, scope="rank"),
    ]


def make(ranks: RankGroup, folder: Path, attempt: int, slots: Any = None, ranks_per_node: int = 0) -> Checkpointer:
    place = RankPosition(ranks.rank, ranks.world_size, ranks_per_node or ranks.world_size)
    return Checkpointer(folder, ranks, place, attempt=attempt, keep=3, slots=slots)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    tensors = [*model.state_dict().values(), *(value for s in optimizer.state.values() for value in s.values())]
    return [float(tensor.double().sum()) for tensor in tensors]


def save(ranks: RankGroup, folder: Path, steps: tuple[int, ...]) -> list[float]:
    model, optimizer = make_model(1)
    checkpointer = make(ranks, folder, 1)
    for step in steps:
        model(torch.full((2, 3), float(step))).sum().backward()
        optimizer.step()
        mine = Own({9: "nine", 10: ranks.rank, "10": (1.5, step)})
        checkpointer.write(checkpointer.copy_to_host(step, entries(model, optimizer, mine), {"at": step}), wait=True)
    checkpointer.close()
    return digest(model, optimizer)


def load(ranks: RankGroup, folder: Path) -> tuple[int, list[float], Any, list[Any]]:
    model, optimizer = make_model(2)
    mine = Own(None)
    checkpointer = make(ranks, folder, 2)
    checkpointer.restore(entries(model, optimizer, mine))
    restored = checkpointer.restored
    assert restored is not None
    assert checkpointer.end_restore() == []
    return restored.step, digest(model, optimizer), mine.value, checkpointer.set_aside


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (3, 3), (4, 2), (2, 3), (3, 1)])
def test_any_number_of_ranks_takes_up_a_checkpoint(tmp_path: Path, saved: int, loaded: int) -> None:
    expected = run_ranks(save, saved, tmp_path, (1, 2))
    answers = run_ranks(load, loaded, tmp_path)
    for rank, (step, values, mine, _) in enumerate(answers):
        assert (step, values) == (2, expected[0])
        assert mine == {9: "nine", 10: rank if saved == loaded else 0, "10": (1.5, 2)}


def save_in_an_order_of_its_own(ranks: RankGroup, folder: Path) -> bool:
    """Each rank's dict has another order, as a set of words has on two nodes."""
    order = sorted(range(6), reverse=ranks.rank > 0)
    expected = {f"t{number}": torch.full((10 + number,), float(number)) for number in order}
    mine = Own(expected)
    checkpointer = make(ranks, folder, 1)
    checkpointer.write(checkpointer.copy_to_host(1, [Entry(name="shared", live=mine)], {}), wait=True)
    checkpointer.close()
    mine.value = {}
    make(ranks, folder, 2).restore([Entry(name="shared", live=mine)])
    return all(torch.equal(mine.value[name], tensor) for name, tensor in expected.items())


def test_ranks_divide_a_state_alike_whatever_the_order_of_their_dicts(tmp_path: Path) -> None:
    assert run_ranks(save_in_an_order_of_its_own, 2, tmp_path) == [True, True]


def corrupt(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a byte of the data": lambda folder: corrupt(folder / "rank_1.safetensors", 0.999),
    "a byte of the header": lambda folder: corrupt(folder / "rank_0.safetensors", 0.0),
    "a file that is shorter": lambda folder: os.truncate(folder / "rank_1.safetensors", 5000),
    "a file that is gone": lambda folder: (folder / "rank_0.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    expected = run_ranks(save, 2, tmp_path, (1,))
    run_ranks(save, 2, tmp_path / "other", (1, 2))
    (tmp_path / "other" / "step_00000002").rename(tmp_path / "step_00000002")
    DAMAGES[damage](tmp_path / "step_00000002")
    for step, values, _, set_aside in run_ranks(load, 2, tmp_path):
        assert (step, values) == (1, expected[0])
        assert [number for number, _ in set_aside] == [2]
    assert (tmp_path / "damaged_step_00000002").exists()


def load_while_away(ranks: RankGroup, folder: Path) -> str:
    """Restore while the file server does not answer rank 1."""
    read = os.preadv

    def preadv(*arguments: Any) -> int:
        if ranks.rank == 1:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments)

    os.preadv = preadv
    try:
        load(ranks, folder)
    except OSError as error:
        return type(error).__name__
    finally:
        os.preadv = read
    return "restored"


def test_a_disk_that_is_away_in_a_restore_sets_nothing_aside(tmp_path: Path) -> None:
    expected = run_ranks(save, 3, tmp_path, (1, 2))
    assert run_ranks(load_while_away, 3, tmp_path) == ["OutsideError", "OSError", "OutsideError"]
    assert not list(tmp_path.glob("damaged*"))
    assert [(step, values) for step, values, *_ in run_ranks(load, 3, tmp_path)] == [(2, expected[0])] * 3


def fails(ranks: RankGroup, folder: Path) -> str:
    try:
        load(ranks, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_no_sound_checkpoint_is_an_error_on_all_ranks_that_names_them(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, (1,))
    corrupt(tmp_path / "step_00000001" / "rank_1.safetensors", 0.999)
    for text in run_ranks(fails, 2, tmp_path):
        assert "step 1" in text
        assert "--fresh" in text


def snapshots(ranks: RankGroup, folder: Path, fault: str) -> Any:
    slots = os.memfd_create("first"), os.memfd_create("second")
    model, optimizer = make_model(1)
    checkpointer = make(ranks, folder, 1, slots)
    for step in (1, 2, 3):
        model(torch.full((2, 3), float(step))).sum().backward()
        optimizer.step()
        least = int(-ranks.maximum(-checkpointer.snapshots.complete)[0])
        checkpointer.snapshot(step, entries(model, optimizer, Own(ranks.rank)), {"at": step}, least)
        checkpointer.snapshots.wait()
        ranks.barrier()
    checkpointer.close()
    expected = digest(model, optimizer)
    if ranks.rank == 0:  # this rank's newest snapshot is no good: all take the one before
        slot = checkpointer.snapshots._slots[0]  # type: ignore[index]
        assert {record.attempt for record in slot.records()} == {1}
        if fault == "damaged":
            slot.memory(0)[RECORD + 8] ^= 1
        else:  # of another attempt, in which the other rank died before it had this one
            slot.write([dataclasses.replace(record, attempt=7) for record in slot.records()])
    ranks.barrier()
    model, optimizer = make_model(2)
    mine = Own(None)
    again = make(ranks, folder, 2, slots)
    first = again.restored
    again.restore(entries(model, optimizer, mine))
    assert first is not None
    assert again.restored is not None
    return first.step, again.restored.step, mine.value, digest(model, optimizer) == expected


@pytest.mark.parametrize(("fault", "first"), [("damaged", 3), ("another attempt", 2)])
def test_the_newest_snapshot_that_all_ranks_have_whole_is_taken(tmp_path: Path, fault: str, first: int) -> None:
    for rank, answer in enumerate(run_ranks(snapshots, 2, tmp_path, fault)):
        assert answer == (first, 2, rank, False)


def on_other_nodes(ranks: RankGroup, folder: Path, slots: list[tuple[int, int]], each: int) -> Any:
    """`each` ranks are on a node. The first is lost, a new one comes last, and the ranks are numbered anew."""
    model, optimizer = make_model(1)
    checkpointer = make(ranks, folder, 1, slots[ranks.rank], ranks_per_node=each)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpointer.snapshot(1, entries(model, optimizer, Own(ranks.rank)), {}, 0)
    checkpointer.snapshots.wait()
    checkpointer.close()
    expected = digest(model, optimizer)
    model, optimizer = make_model(2)
    mine = Own(None)
    again = make(ranks, folder, 2, slots[ranks.rank + each], ranks_per_node=each)
    again.restore(entries(model, optimizer, mine))
    assert again.restored is not None
    return again.restored.step, mine.value, digest(model, optimizer) == expected


@pytest.mark.parametrize(("count", "each"), [(3, 1), (4, 2)])
def test_a_snapshot_of_a_lost_node_lies_on_the_next_and_goes_to_the_nodes_that_need_it(
    tmp_path: Path, count: int, each: int
) -> None:
    slots = [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(count + each)]
    assert run_ranks(on_other_nodes, count, tmp_path, slots, each) == [(1, rank, True) for rank in range(count)]


def without_room(ranks: RankGroup, folder: Path) -> bool:
    """One rank finds no room for a snapshot; returns whether this one goes on with them."""
    memory.free_bytes = lambda: 0 if ranks.rank == 1 else 1 << 40
    checkpointer = make(ranks, folder, 1, (os.memfd_create("first"), os.memfd_create("second")))
    checkpointer.snapshot(1, [Entry(name="own", live=Own(1))], {}, 0)
    return checkpointer.snapshots.is_on


def test_a_rank_without_room_ends_the_snapshots_of_all(tmp_path: Path) -> None:
    assert run_ranks(without_room, 3, tmp_path) == [False] * 3


def on_disks_of_their_own(ranks: RankGroup, folder: Path, lost: dict[int, list[str]]) -> int | str:
    """Save at steps 1 and 2 on a disk a rank, lose some ranks' checkpoints, and return the step that all begin with."""
    place = RankPosition(ranks.rank, ranks.world_size, 1, tuple((rank,) for rank in range(ranks.world_size)))
    disk, own = folder / str(ranks.rank), [Entry(name="own", live=Own(1))]
    checkpointer = Checkpointer(disk, ranks, place, attempt=1, keep=3)
    for step in (1, 2):
        checkpointer.write(checkpointer.copy_to_host(step, own, {}), wait=True)
    checkpointer.close()
    for name in lost.get(ranks.rank, []):
        shutil.rmtree(disk / name)
    try:
        restored = Checkpointer(disk, ranks, place, attempt=2, keep=3).restored
    except CheckpointError as error:
        return str(error)
    return restored.step if restored is not None else 0


def test_disks_of_their_own_go_on_from_the_newest_step_that_all_have(tmp_path: Path) -> None:
    newest, both = ["step_00000002"], ["step_00000001", "step_00000002"]
    assert run_ranks(on_disks_of_their_own, 3, tmp_path / "newest", {1: newest}) == [1, 1, 1]
    answers = run_ranks(on_disks_of_their_own, 3, tmp_path / "all", {2: both})
    assert all("rank 2: none" in str(answer) for answer in answers), answers


def snapshot(ranks: RankGroup, folder: Path, slots: list[tuple[int, int]]) -> None:
    """A checkpoint of step 1, and a snapshot of step 2."""
    save(ranks, folder, (1,))
    model, optimizer = make_model(3)
    checkpointer = make(ranks, folder, 2, slots[ranks.rank])
    checkpointer.snapshot(2, entries(model, optimizer, Own(ranks.rank)), {}, 0)
    checkpointer.snapshots.wait()
    checkpointer.close()


def found(ranks: RankGroup, folder: Path, slots: list[tuple[int, int]]) -> tuple[str, int]:
    restored = make(ranks, folder, 3, slots[ranks.rank]).restored
    assert restored is not None
    return restored.where, restored.step


def test_a_snapshot_is_for_as_many_ranks_as_took_it_and_others_take_the_checkpoint(tmp_path: Path) -> None:
    slots = [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(3)]
    run_ranks(snapshot, 3, tmp_path, slots)
    assert run_ranks(found, 3, tmp_path, slots) == [("memory", 2)] * 3
    assert run_ranks(found, 2, tmp_path, slots) == [("disk", 1)] * 2


def differs(ranks: RankGroup, folder: Path) -> str:
    from jobkit.checkpoint.replicas import check_replicas

    model, optimizer = make_model(ranks.rank)
    checkpointer = make(ranks, folder, 1)
    try:
        check_replicas(entries(model, optimizer, Own(0)), checkpointer.stager, ranks)
    except UsageError as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    assert all("model/0.weight" in text for text in run_ranks(differs, 2, tmp_path))
