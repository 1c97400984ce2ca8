"""What the ranks of a save and of a restore read and send to each other: nothing twice."""

from __future__ import annotations

import io
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import Team, on_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from jobkit.errors import CheckpointError
from jobkit.group import RankGroup

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model_like(seed: int = 0) -> dict[str, Any]:
    """A large tensor, many small ones, an empty one, and what is no tensor."""
    return {
        "large": numbers(512, 257, seed=seed),
        **{f"small.{number}": numbers(50, seed=number) for number in range(300)},
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3 + seed),
        "half": numbers(33, 7, seed=seed, dtype=torch.bfloat16),
        "note": "a text",
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    pairs = [(value, right[key]) for key, value in left.items()]
    return list(left) == list(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


class CountedFile(io.FileIO):
    """Counts the bytes that this process reads of the files of a checkpoint; the disk may refuse them."""

    nbytes = 0
    refuses = False

    def readinto(self, buffer: Any) -> int:
        if CountedFile.refuses:
            raise OSError(5, "Input/output error")
        count = super().readinto(buffer)
        assert count is not None
        CountedFile.nbytes += count
        return count


def count_reads() -> None:
    plain = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        return CountedFile(path) if path.suffix == ".bin" and args[:1] == ("rb",) else plain(path, *args, **options)

    Path.open = opened  # type: ignore[method-assign]


# Restore


def restore_replicated(team: Team, root: Path) -> tuple[int, int, list[str]]:
    checkpointer = team.checkpointer(root)
    checkpointer.save(1, {"model": model_like()}).wait()
    loaded = checkpointer.load_newest(names=())
    assert loaded is not None
    with_blocks_of(64 << 10)
    count_reads()
    assert same(checkpointer.read(loaded, {"model": {}})["model"], model_like())
    nbytes, errors = CountedFile.nbytes, []

    CountedFile.refuses = team.rank == 1  # whatever it is that this rank reads
    try:
        checkpointer.read(loaded, {"model": {}})
    except CheckpointError as error:
        errors.append(str(error))
    CountedFile.refuses = False
    assert same(checkpointer.read(loaded, {"model": {}})["model"], model_like())
    return nbytes, sum(file.size for file in loaded.manifest.files.values()), errors


def with_blocks_of(size: int) -> None:
    from jobkit.checkpoint import transfer

    transfer._BLOCK = size


def test_a_replicated_tensor_is_read_by_one_rank_which_sends_it_and_each_reads_its_share(tmp_path: Path) -> None:
    """That the disk of one refuses is an error on all ranks, and none waits for it."""
    found = on_ranks(3, restore_replicated, tmp_path)
    assert sum(nbytes for nbytes, _, _ in found) <= found[0][1]
    assert all(nbytes > found[0][1] / 6 for nbytes, _, _ in found)
    for _, _, errors in found:
        assert len(errors) == 1 and "rank 1: OSError: [Errno 5] Input/output error" in errors[0]


def restore_spread(team: Team, root: Path) -> tuple[int, int]:
    """A tensor of which each shard has two copies, and one that is restored whole on some ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    placements = (Replicate(), Shard(0))
    spread = {"weight": distribute_tensor(numbers(65, 300), mesh, placements)}
    checkpointer = team.checkpointer(root)
    checkpointer.save(1, {"model": spread}).wait()
    loaded = checkpointer.load_newest(names=())
    assert loaded is not None
    count_reads()
    empty = {"weight": distribute_tensor(torch.zeros(65, 300), mesh, placements)}
    read = checkpointer.read(loaded, {"model": empty})["model"]["weight"]
    assert isinstance(read, DTensor) and torch.equal(read.to_local(), spread["weight"].to_local())
    nbytes = CountedFile.nbytes
    other = {"weight": distribute_tensor(torch.zeros(65, 300), mesh, (Shard(1), Shard(0)))}
    read = checkpointer.read(loaded, {"model": other})["model"]["weight"]
    assert torch.equal(read.full_tensor(), numbers(65, 300))
    return nbytes, sum(file.size for file in loaded.manifest.files.values())


def test_so_is_a_shard_of_which_there_are_copies(tmp_path: Path) -> None:
    found = on_ranks(4, restore_spread, tmp_path)
    assert sum(nbytes for nbytes, _ in found) <= found[0][1]


# Save


class Sent:
    """What a rank sends to rank 0 as objects, and how often rank 0 makes a plan."""

    def __init__(self) -> None:
        self.nbytes = self.plans = 0
        gather, plan = RankGroup.gather_on_main, DefaultSavePlanner.create_global_plan

        def gather_on_main(group: RankGroup, value: Any) -> list[Any]:
            self.nbytes += len(pickle.dumps(value))
            return gather(group, value)

        def create_global_plan(planner: DefaultSavePlanner, plans: Any) -> Any:
            self.plans += 1
            return plan(planner, plans)

        RankGroup.gather_on_main = gather_on_main  # type: ignore[method-assign]
        DefaultSavePlanner.create_global_plan = create_global_plan  # type: ignore[method-assign]

    def since(self) -> tuple[int, int]:
        found = self.nbytes, self.plans
        self.nbytes = self.plans = 0
        return found


def save_again_and_again(team: Team, root: Path) -> list[tuple[int, int]]:
    sent, checkpointer, found = Sent(), team.checkpointer(root, keep=9), []
    mesh = init_device_mesh("cpu", (2,))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    local: dict[str, Any] = {"own": numbers(5, seed=team.rank)}
    saved: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def save(step: int, **change: Any) -> None:
        shared = {**model_like(step), "note": "a longer text" * step, **change}
        spread = {"weight": distribute_tensor(numbers(7, 3, seed=step), mesh, [Shard(0)])}
        saved[step] = shared, dict(local)
        error = checkpointer.save(step, {"model": shared, "spread": spread}, local).outcome().error
        assert (error is not None) == (step == 3), error
        found.append(sent.since())

    save(1)
    save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    save(3)  # fails
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(4)
    if team.rank == 1:
        local["own"] = local["own"].double()  # a dtype, and on one rank only
    save(5)
    save(6)
    checkpointer.close()
    for step in (6, 5, 4, 2, 1):
        loaded = checkpointer.load_newest()
        assert loaded is not None and loaded.step == step
        assert same(loaded.shared["model"], saved[step][0]) and same(loaded.local, saved[step][1])
        assert torch.equal(loaded.shared["spread"]["weight"], numbers(7, 3, seed=step))
        dist.barrier(team.group)
        if team.rank == 0:
            shutil.rmtree(checkpointer.store.path(step))
    return found


def test_the_plan_of_a_save_is_kept_until_a_rank_has_something_else_to_save(tmp_path: Path) -> None:
    found = on_ranks(2, save_again_and_again, tmp_path)
    assert [plans for _, plans in found[0]] == [1, 0, 0, 0, 1, 0]
    whole, again, failed, after_it, changed, last = (
        sum(nbytes for nbytes, _ in pair) for pair in zip(*found, strict=True)
    )
    assert changed > whole / 2 and max(again, failed, after_it, last) < whole / 9
