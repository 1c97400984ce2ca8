"""Nodes without a shared disk: what each keeps, what all continue from, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt_of_rank, stop_after
from harness.ranks import Team, on_ranks
from torch import nn

from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import CheckpointError, JobkitError
from jobkit.group import RankGroup
from jobkit.worker import disks

# Whole attempts


def train(ctx: Any, stop: bool) -> tuple[int, list[float]]:
    """(first step, the weights at the end)."""
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    first = ctx.step
    for _ in ctx.steps(6):
        model(next(loader)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            stop_after(ctx, 2)
    return first, [value for weight in model.parameters() for value in weight.flatten().tolist()]


def _on_nodes(team: Team, folders: list[Path], per_node: int, stop: bool, config: str) -> Any:
    node, local_rank = divmod(team.rank, per_node)
    place = {"RANK": team.rank, "WORLD_SIZE": team.world_size, "GROUP_RANK": node}
    place |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_node}
    os.environ.update({name: str(value) for name, value in place.items()})
    disks.LATE_SECONDS = 0.2
    try:
        return attempt_of_rank(team, folders[team.rank], train, (stop,), config)
    except JobkitError as error:  # of jobkit.init itself
        return f"{type(error).__name__}: {error}"


def attempt(*folders: Path, per_node: int = 1, stop: bool = False, config: str = "") -> list[Any]:
    """An attempt with the runs directory that each rank has."""
    return on_ranks(len(folders), _on_nodes, folders, per_node, stop, config)


def test_with_ddp_each_node_keeps_a_copy_and_the_run_ends_with_the_uninterrupted_weights(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert attempt(a, b, stop=True) == [STOPPED] * 2
    for node in (a, b):
        (checkpoint,) = node.glob("run-*/checkpoints/step_*")
        assert (checkpoint / "manifest.json").exists()
    assert list(tmp_path.rglob("seen-*")) == []
    swapped = attempt(b, a)
    assert all("start each node with the --node_rank that it had" in str(one) for one in swapped)
    shutil.copytree(a, tmp_path / "alone")
    resumed = attempt(a, b)
    whole = attempt(*[tmp_path / "shared"] * 2)
    assert [first for first, _ in resumed] == [3] * 2
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]
    left = attempt(tmp_path / "alone", tmp_path / "new")
    assert all("no step has a checkpoint on every node's disk" in str(one) for one in left)
    assert "alone/run-" in left[0] and "new/run-" in left[0] and ": none" in left[0]


REFUSED = {
    "a sharded model": ("ab", 1, "parallel: zero3\n", "set runs_dir=... or JOBKIT_RUNS to a folder that all nodes see"),
    "a node with two": ("abcc", 2, "", "ranks of one node have run directories of their own"),
}


@pytest.mark.parametrize(("folders", "per_node", "config", "said"), REFUSED.values(), ids=REFUSED)
def test_folders_that_would_not_hold_the_state_are_refused_with_who_has_what(
    tmp_path: Path, folders: str, per_node: int, config: str, said: str
) -> None:
    refused = attempt(*(tmp_path / name for name in folders), per_node=per_node, config=config)
    for error in refused:
        assert error.startswith("DistributedError") and said in error and "\n" not in error
        assert all(str(tmp_path / name) in error for name in set(folders))
    assert not list(tmp_path.rglob("events.jsonl"))


def test_ranks_of_which_one_sees_the_other_share_a_disk_though_one_file_is_late() -> None:
    assert disks._merged([[0, 2], [0, 2], [0, 2], [0, 2]]) == ((0, 1, 2, 3),)
    assert disks._merged([[0], [0], [0, 2], [2]]) == ((0, 1, 2, 3),)
    assert disks._merged([[0, 2], [0], [2], [2]]) == ((0, 1, 2, 3),)
    assert disks._merged([[0], [0], [2], [2]]) == ((0, 1), (2, 3))
    assert disks._merged([[0], [], [2], [2]]) == ((0,), (1,), (2, 3))


# Checkpoints


def checkpointer(team: Team, root: Path) -> Checkpointer:
    everyone = RankGroup.of(team.group)
    store = Store(root / f"node{team.rank // 2}", missing_seconds=0.0)
    return Checkpointer(store, RankGroup.of_parts([[0, 1], [2, 3]]), disks=Disks(everyone, several=True))


def damage(file: Path) -> None:
    file.write_bytes(b"")


def save_and_damage(team: Team, root: Path) -> list[Any]:
    made = checkpointer(team, root)
    own = root / f"node{team.rank // 2}"

    def save(step: int) -> str:
        made.save(step, {"x": torch.full((8,), float(step))}, {"rank": team.rank}).wait()
        return f"step_{step:08d}"

    def then(action: Callable[[], object]) -> None:
        made.wait()
        torch.distributed.barrier()
        if team.rank == 2:
            action()
        torch.distributed.barrier()

    def load() -> Any:
        loaded = made.load_newest()
        assert loaded is not None and loaded.local == {"rank": team.rank} and loaded.manifest.world_size == 4
        assert loaded.shared["x"].tolist() == [float(loaded.step)] * 8
        return loaded.step, [step for step, _ in made.set_aside], made.store.steps()

    found: list[Any] = []
    for step in (1, 2, 3):
        name = save(step)
    then(lambda: damage(own / name / "rank_00001.bin"))
    found.append(load())
    for step in (3, 4):
        name = save(step)
    then(lambda: shutil.rmtree(own / name))
    found.append(load())
    name = save(4)
    then(lambda: (own / name).rename(own / "step_other"))
    save(4)
    then(lambda: (shutil.rmtree(own / name), (own / "step_other").rename(own / name)))
    found.append(load())
    then(lambda: [damage(file) for file in own.glob("step_*/index.pickle")])
    with pytest.raises(CheckpointError, match="none of the checkpoints") as refused:
        made.load_newest()
    return [*found, "on " in str(refused.value) and "index.pickle has 0 bytes" in str(refused.value)]


def test_all_nodes_continue_from_the_newest_step_that_is_good_on_every_disk(tmp_path: Path) -> None:
    for rank, (damaged, lost, other, named) in enumerate(on_ranks(4, save_and_damage, tmp_path)):
        assert damaged == (2, [3], [2, 1])
        assert lost == (3, [4] if rank < 2 else [], [3, 2])
        assert other == (3, [4], [3, 2])
        assert named


def save_where_one_disk_is_full(team: Team, root: Path) -> tuple[str, list[int]]:
    made = checkpointer(team, root)
    made.save(1, {"x": torch.ones(8)}).wait()
    made.wait()
    if team.rank == 2:
        (root / "node1" / ".staging_step_00000002.0").write_text("in the way")
        made.store.stage = lambda step: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore
    return str(made.save(2, {"x": torch.ones(8)}).outcome().error), made.store.steps()


def test_a_save_that_fails_on_one_disk_has_failed_on_all(tmp_path: Path) -> None:
    for error, steps in on_ranks(4, save_where_one_disk_is_full, tmp_path):
        assert "No space left on device" in error
        assert steps == [1]
