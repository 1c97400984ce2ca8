"""What a restore gives: tensors with memory of their own, and of a bad checkpoint nothing."""

from __future__ import annotations

import gc
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from jobkit.checkpoint import sources, targets
from jobkit.checkpoint.state import named_tensors
from jobkit.checkpoint.storage import read_exactly
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int64, torch.float8_e4m3fn,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (2, 3), (3, 1, 5), (50, 41), (400, 300))


def mixed(seed: int = 0) -> dict[str, Any]:
    """Every dtype in every shape, as neighbours of one dtype, and of one shape with a text between."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 2 + 98 * (dtype != torch.bool), shape, generator=generator).to(dtype)

    by_dtype = {f"{dtype}.{shape}": random(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    by_shape = [[random(shape, dtype) for dtype in DTYPES] + [f"of {shape}"] for shape in SHAPES]
    return {"by dtype": by_dtype, "by shape": by_shape, "large": random((3 << 20, 1), torch.float32)}


def differences(found: Any, saved: Any) -> list[str]:
    left, right = named_tensors(found), named_tensors(saved)
    return [
        key
        for key in {**left, **right}
        if left[key].dtype != right[key].dtype
        or left[key].shape != right[key].shape
        or left[key].flatten().view(torch.uint8).tolist() != right[key].flatten().view(torch.uint8).tolist()
    ]


def restore_mixed(team: Team, root: Path) -> tuple[list[str], list[str]]:
    checkpointer = team.checkpointer(root)
    checkpointer.save(1, {"state": mixed()}, {"own": mixed(team.rank)}).wait()
    loaded = checkpointer.load_newest()
    assert loaded is not None and loaded.shared["state"]["by shape"][2][-1] == "of (1,)"
    return differences(loaded.shared["state"], mixed()), differences(loaded.local["own"], mixed(team.rank))


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_every_dtype_and_shape_come_back_beside_each_other(tmp_path: Path, ranks: int) -> None:
    assert on_ranks(ranks, restore_mixed, tmp_path) == [([], [])] * ranks


def restored(root: Path, state: Any) -> Any:
    checkpointer = Checkpointer(Store(root, missing_seconds=0.0))
    checkpointer.save(1, {"state": state}).wait()
    loaded = checkpointer.load_newest()
    assert loaded is not None
    return loaded.shared["state"]


def test_no_restored_tensor_keeps_the_memory_of_another_nor_is_saved_with_it(tmp_path: Path) -> None:
    found = named_tensors(restored(tmp_path, mixed()))
    storages = [tensor.untyped_storage() for tensor in found.values() if tensor.numel()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for name, tensor in found.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    torch.save(next(tensor for tensor in found.values() if tensor.shape == (7,)), buffer := io.BytesIO())
    assert len(buffer.getvalue()) < 3000


def test_a_tensor_restored_without_gradients_can_be_trained_and_changed_in_place(tmp_path: Path) -> None:
    with torch.no_grad():
        found = restored(tmp_path, [torch.ones(2, 3) for _ in range(3)])
    assert not any(tensor._is_view() for tensor in found)
    weight = found[1].requires_grad_()
    (weight * 2).sum().backward()
    found[0].mul_(weight.detach())
    assert weight.grad.eq(2).all() and found[0].resize_(100).numel() == 100


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with much to read, on many CPUs."""
    monkeypatch.setattr(sources, "_PIECE", 5000)
    monkeypatch.setattr(sources, "_cpus", lambda: 3)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("startable", [3, 1, 0])
def test_a_state_is_restored_by_as_many_threads_as_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, startable: int
) -> None:
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("checkpoint-read"):
            if len(started) == startable:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert differences(restored(tmp_path, mixed()), mixed()) == [] and len(started) == startable


@pytest.mark.usefixtures("in_threads")
def test_what_a_thread_cannot_read_fails_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: Any, offset: int, target: memoryview) -> None:
        if threading.current_thread() is not threading.main_thread() and len(target) > 1 << 20:
            raise OSError(5, "Input/output error")
        read_exactly(file, offset, target)

    monkeypatch.setattr(targets, "read_exactly", read)
    with pytest.raises(CheckpointError, match=r"step 1 is whole but cannot be loaded: .*Input/output error"):
        restored(tmp_path, mixed())


def restore_one_element(team: Team, root: Path) -> list[float]:
    """Into parts of one element, which count as contiguous at any distance from a next one."""
    mesh = init_device_mesh("cpu", (2,))
    checkpointer = team.checkpointer(root)
    saved = distribute_tensor(torch.tensor([[3.0], [4]]), mesh, [Shard(0)])
    live = DTensor.from_local(torch.zeros(2)[::2].view(1, 1).t(), mesh, [Shard(0)])
    checkpointer.save(1, {"state": {"one": saved}}).wait()
    assert checkpointer.load_newest({"state": {"one": live}}) is not None
    return live.full_tensor().flatten().tolist()  # type: ignore[no-any-return]


def test_a_part_of_one_element_is_filled_whatever_its_strides(tmp_path: Path) -> None:
    assert on_ranks(2, restore_one_element, tmp_path) == [[3, 4], [3, 4]]


# Of a bad one


def damage_the_end(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def cut_the_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def spread(value: float) -> dict[str, Any]:
    """Sharded tensors first in the files, replicated ones after."""
    mesh = init_device_mesh("cpu", (2,))
    shards = [distribute_tensor(torch.full((9, 5), value), mesh, [Shard(0)]) for _ in range(3)]
    return {"shards": shards, "whole": [torch.full((300,), value) for _ in range(40)]}


def fall_back(team: Team, root: Path, damage: Any) -> tuple[list[float], bool]:
    checkpointer = team.checkpointer(root)
    for step in (1, 2):
        checkpointer.save(step, {"state": spread(step)}).wait()

    def spoil(step: int) -> None:
        torch.distributed.barrier(team.group)
        if team.rank == 0:
            damage(checkpointer.store.path(step) / "rank_00001.bin")  # that of the other rank
        torch.distributed.barrier(team.group)

    found, live = [], spread(0.0)
    spoil(2)
    loaded = checkpointer.load_newest({"state": live})
    assert loaded is not None
    for tensor in (*loaded.shared["state"]["shards"], *loaded.shared["state"]["whole"], *live["shards"]):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found += local.unique().tolist()
    spoil(1)
    untouched = spread(7.0)
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        checkpointer.load_newest({"state": untouched})
    return found, all(shard.to_local().eq(7).all() for shard in untouched["shards"]) and gc.isenabled()


@pytest.mark.parametrize("damage", [damage_the_end, cut_the_end])
def test_of_a_checkpoint_that_is_damaged_at_its_end_nothing_comes_into_live_tensors(
    tmp_path: Path, damage: Any
) -> None:
    """Not of what lies before the damage either, and on no rank: the checkpoint before, or nothing."""
    for values, is_untouched in on_ranks(2, fall_back, tmp_path, damage):
        assert set(values) == {1.0} and is_untouched


def test_a_file_that_is_cut_off_after_it_was_verified_is_an_error_that_names_it(tmp_path: Path) -> None:
    checkpointer = Checkpointer(Store(tmp_path, missing_seconds=0.0))
    checkpointer.save(1, {"state": mixed()}).wait()
    loaded = checkpointer.load_newest(names=())
    assert loaded is not None
    cut_the_end(tmp_path / "step_00000001" / "rank_00000.bin")
    with pytest.raises(CheckpointError, match=r"rank_00000.bin: ends before byte"):
        checkpointer.read(loaded, {"state": {}})
