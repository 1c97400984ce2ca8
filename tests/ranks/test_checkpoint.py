"""Checkpoints: complete or absent, verified on load, one choice for all ranks, written while the training goes on."""

from __future__ import annotations

import collections
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness.ranks import Team, on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from jobkit.checkpoint.staging import HostBuffers, balance
from jobkit.checkpoint.state import escape, flatten, rng_state, set_rng_state, unescape, unflatten
from jobkit.checkpoint.store import FileDigest, Manifest, Store, digest_of
from jobkit.checkpoint.writer import Checkpointer, Saved
from jobkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(root, missing_seconds=0.0)


def same(left: Any, right: Any) -> bool:
    """Equal in every type and every bit."""
    if isinstance(left, torch.Tensor):
        same_bytes = flatten_bytes(left) == flatten_bytes(right)
        return left.dtype == right.dtype and left.shape == right.shape and same_bytes
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, np.ndarray):
        return bool((left == right).all())
    return bool(left == right)


def flatten_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def a_model_after_some_steps(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Pair(NamedTuple):
    first: Any
    second: Any


def an_odd_tree() -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(6, 8, generator=generator)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]
    return {
        "none": None,
        3: [1, 2.5, "text", True, b"bytes", {1, 2}, 1 << 90],
        "a/b~c": collections.OrderedDict(z=torch.tensor(4.0), a=torch.zeros(0, 3)),
        "pair": Pair((), [torch.tensor(True)]),
        (1, 2): {str(dtype): (whole * 3).to(dtype) for dtype in dtypes},
        "not contiguous": [whole.t(), whole[::2, 1::3], whole[0].expand(4, 8)],
        "view": whole[1:3],
        "large": torch.randn(3_000_000, generator=generator),
    }


def shared_state(seed: int = 0) -> dict[str, Any]:
    model, optimizer = a_model_after_some_steps(seed)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": an_odd_tree()}


def save_shared(team: Team, root: Path, steps: list[int], **options: Any) -> list[Saved]:
    checkpointer = team.checkpointer(root, **options)
    pending = [checkpointer.save(step, shared_state(step), {"rank": team.rank, "step": step}) for step in steps]
    checkpointer.close()
    return [save.outcome() for save in pending]


def load_and_compare(team: Team, root: Path) -> tuple[int, Any, list[tuple[int, str]]] | None:
    checkpointer = team.checkpointer(root)
    loaded = checkpointer.load_newest()
    if loaded is None:
        return None
    assert same(loaded.shared, shared_state(loaded.step)), "what was loaded is not what was saved"
    return loaded.step, loaded.local, checkpointer.set_aside


# What goes in comes out


def test_any_tree_of_state_comes_back_with_its_types_and_bits() -> None:
    tree = an_odd_tree()
    skeleton, tensors = flatten(tree)
    assert same(unflatten(skeleton, tensors), tree)
    assert len(skeleton) < 3000, "tensors are in the skeleton"


def test_a_module_state_dict_keeps_its_metadata() -> None:
    state = a_model_after_some_steps()[0].state_dict()
    again = unflatten(*flatten(state))
    assert again._metadata == state._metadata


def test_one_tensor_at_two_places_stays_one_tensor() -> None:
    tensor = torch.ones(2)
    skeleton, tensors = flatten({"a": tensor, "b": [tensor], "parameter": torch.nn.Parameter(torch.ones(1))})
    again = unflatten(skeleton, {key: value.detach().clone() for key, value in tensors.items()})
    assert again["a"] is again["b"][0]
    assert isinstance(again["parameter"], torch.nn.Parameter)


def test_a_sparse_tensor_and_one_inside_an_object_are_kept() -> None:
    tree = {"sparse": torch.eye(3).to_sparse(), "namespace": collections.UserDict(inner=torch.arange(3))}
    again = unflatten(*flatten(tree))
    assert torch.equal(again["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(again["namespace"]["inner"], torch.arange(3))


@pytest.mark.parametrize("key", ["plain", "a/b", "~", "~|", "a~~/b", "~1", "", "model.0"])
def test_a_path_part_gives_its_key_back(key: str) -> None:
    assert unescape(escape(key)) == key
    assert "/" not in escape(key)


def test_an_int_and_the_string_of_it_are_two_keys() -> None:
    tree = {1: torch.tensor(1), "1": torch.tensor(2), "~1": torch.tensor(3)}
    assert same(unflatten(*flatten(tree)), tree)


def test_the_random_numbers_continue() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = rng_state("cpu")
    expected = draw()
    set_rng_state(state, "cpu")
    assert draw() == expected


def test_model_optimizer_and_odd_trees_round_trip_through_the_disk(root: Path) -> None:
    alone = Team(0, 1, None)
    assert [saved.error for saved in save_shared(alone, root, [5])] == [None]
    assert load_and_compare(alone, root) == (5, {"rank": 0, "step": 5}, [])


def test_training_continues_bit_for_bit_from_a_checkpoint(root: Path) -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer = a_model_after_some_steps()
    checkpointer = Checkpointer(Store(root))
    checkpointer.save(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, rng_state("cpu"))
    expected = steps(model, optimizer)

    model, optimizer = a_model_after_some_steps(seed=1)
    loaded = checkpointer.load_newest()
    assert loaded is not None
    model.load_state_dict(loaded.shared["model"])
    optimizer.load_state_dict(loaded.shared["optimizer"])
    set_rng_state(loaded.local, "cpu")
    assert same(steps(model, optimizer), expected)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_of_one_world_size_loads_on_another(root: Path, savers: int, loaders: int) -> None:
    for saved in on_ranks(savers, save_shared, root, [4]):
        assert saved[0].error is None
    for rank, result in enumerate(on_ranks(loaders, load_and_compare, root)):
        assert result == (4, {"rank": rank, "step": 4} if rank < savers else None, [])


def test_replicated_tensors_are_written_once_and_by_all_ranks(root: Path) -> None:
    saves = on_ranks(2, save_shared, root, [1])
    whole = sum(tensor.nbytes for tree in shared_state(1).values() for tensor in flatten(tree)[1].values())
    written = [saved.nbytes for (saved,) in saves]
    assert sum(written) == whole
    assert all(written)


def test_balance_gives_every_rank_about_the_same() -> None:
    sizes = [random.Random(0).randrange(1000) for _ in range(200)]
    owners = balance(sizes, range(4))
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) < 1000


# Sharded tensors


def sharded(team: Team) -> dict[str, Any]:
    if team.group is None:
        return {}
    mesh = DeviceMesh.from_group(team.group, "cpu")
    rows = torch.arange(5 * 4, dtype=torch.float32).view(5, 4)
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows * 2, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(rows.bfloat16(), mesh, [Replicate()]),
        "nested": [{"few": distribute_tensor(torch.arange(2), mesh, [Shard(0)])}],
        "step": 7,
    }


def save_sharded(team: Team, root: Path) -> Any:
    return team.checkpointer(root).save(1, {"model": sharded(team)}).outcome().error


def load_sharded(team: Team, root: Path) -> Any:
    template = sharded(team)
    for tensor in flatten(template)[1].values():
        tensor.zero_()
    loaded = team.checkpointer(root).load_newest(templates={"model": template})
    assert loaded is not None
    for key, tensor in flatten(template)[1].items():
        assert isinstance(tensor, DTensor)
        assert flatten(loaded.shared["model"])[1][key] is tensor, "a template is filled in place"
    return {
        key: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()
        for key, tensor in flatten(loaded.shared["model"])[1].items()
    }


@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (3, 2), (2, 1)])
def test_sharded_tensors_are_resharded(root: Path, savers: int, loaders: int) -> None:
    assert on_ranks(savers, save_sharded, root) == [None] * savers
    rows = torch.arange(20.0).view(5, 4)
    expected = {
        "rows": rows.tolist(),
        "columns": (rows * 2).tolist(),
        "everywhere": rows.tolist(),
        "nested/~0/few": [0, 1],
    }
    assert on_ranks(loaders, load_sharded, root) == [expected] * loaders


def test_whole_tensors_load_into_shards(root: Path) -> None:
    rows = torch.arange(20.0).view(5, 4)
    whole = {"rows": rows, "columns": rows * 2, "everywhere": rows.bfloat16(), "nested": [{"few": torch.arange(2)}]}
    Checkpointer(Store(root)).save(1, {"model": whole}).wait()
    assert on_ranks(2, load_sharded, root)[1]["columns"] == (rows * 2).tolist()


def save_stages(team: Team, root: Path) -> Any:
    """Ranks 0 and 1 have the first stage of a pipeline, rank 2 has the second."""
    stage, ranks = ("first", (0, 1)) if team.rank < 2 else ("second", (2,))
    state = {stage: {"weight": torch.full((3,), float(ranks[0])), "bias": torch.ones(1)}}
    checkpointer = team.checkpointer(root)
    error = checkpointer.save(1, state, held_by={stage: ranks}).outcome().error
    loaded = checkpointer.load_newest(names=[stage])
    assert error is None
    assert loaded is not None
    return {name: tree["weight"].tolist() for name, tree in loaded.shared.items()}


def test_a_tree_that_only_some_ranks_hold_is_saved_whole(root: Path) -> None:
    results = on_ranks(3, save_stages, root)
    assert results == [{"first": [0.0] * 3}, {"first": [0.0] * 3}, {"second": [2.0] * 3}]


# Damage


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def edit_the_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 2', '"step": 9'))


def edit_the_step_and_the_checksum(path: Path) -> None:
    path.write_text(json.dumps(Manifest(9, 2, {}).to_json()))


DAMAGES = [
    ("rank_00001.bin", flip_a_byte, "has checksum"),
    ("rank_00000.bin", truncate, "bytes, not"),
    ("rank_00001.bin", Path.unlink, "rank_00001.bin is missing"),
    ("index.pickle", flip_a_byte, "index.pickle has checksum"),
    ("manifest.json", truncate, "manifest.json is not valid"),
    ("manifest.json", Path.unlink, "manifest.json is missing"),
    ("manifest.json", edit_the_step, "checksum"),
    ("manifest.json", edit_the_step_and_the_checksum, "is that of step 9"),
]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("two") / "checkpoints"
    on_ranks(2, save_shared, root, [1, 2])
    yield root


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_damage_is_found_and_all_ranks_fall_back_to_the_checkpoint_before(
    root: Path, two_checkpoints: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    shutil.copytree(two_checkpoints, root, symlinks=True)
    damage(root / "step_00000002" / name)
    results = on_ranks(2, load_and_compare, root)
    for rank, (step, local, set_aside) in enumerate(results):
        assert (step, local) == (1, {"rank": rank, "step": 1})
        assert [bad for bad, _ in set_aside] == [2]
        assert reason in set_aside[0][1]
    assert Store(root).steps() == [1]
    assert reason in (root / "step_00000002.corrupt" / "REASON").read_text()


def test_where_every_checkpoint_is_bad_that_is_an_error_each_time(root: Path) -> None:
    checkpointer = Checkpointer(Store(root, missing_seconds=0.0))
    for step in (1, 2):
        checkpointer.save(step, {"x": torch.ones(100)}).wait()
        truncate(root / f"step_{step:08d}" / "rank_00000.bin")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"step 2: rank_00000.bin has .*; step 1: rank_00000.bin has .*--fresh"
        ):
            checkpointer.load_newest()
        assert (Store(root).steps(), checkpointer.set_aside) == ([2, 1], [])


def write_on_a_disk_of_its_own(team: Team, root: Path, folder_is_there: bool) -> str:
    if folder_is_there:
        Store(root / f"disk_{team.rank}").staging(1).mkdir(parents=True)
    saved = team.checkpointer(root / f"disk_{team.rank}").save(1, {"x": torch.ones(100)}, {"rank": team.rank})
    return str(saved.outcome().error)


@pytest.mark.parametrize("folder_is_there", [False, True])
def test_a_checkpoint_is_published_only_where_every_ranks_file_is_seen(tmp_path: Path, folder_is_there: bool) -> None:
    errors = on_ranks(2, write_on_a_disk_of_its_own, tmp_path, folder_is_there)
    missing = "rank_00001.bin is missing" if folder_is_there else ".staging_step_00000001.0 is missing here"
    for error in errors:
        assert missing in error and "the same disk" in error
    assert [path for path in tmp_path.rglob("step_*") if not path.name.startswith(".")] == []


def test_a_file_that_is_cut_off_before_it_is_published_is_noticed(root: Path) -> None:
    store = Store(root, missing_seconds=0.0)
    (store.stage(1) / "rank_00000.bin").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin has 2 bytes, not 3"):
        store.publish(Manifest(1, 1, {"rank_00000.bin": FileDigest(3, 0)}))
    assert store.steps() == []


def test_without_any_checkpoint_there_is_none(root: Path) -> None:
    assert Checkpointer(Store(root)).load_newest() is None


@pytest.mark.parametrize("latest", ["deleted", "dangling"])
def test_the_latest_link_does_not_matter(root: Path, latest: str) -> None:
    alone = Team(0, 1, None)
    save_shared(alone, root, [1, 2])
    assert (root / "latest").readlink() == Path("step_00000002")
    (root / "latest").unlink()
    if latest == "dangling":
        (root / "latest").symlink_to("step_00000077")
    assert load_and_compare(alone, root) == (2, {"rank": 0, "step": 2}, [])
    save_shared(alone, root, [3])
    assert (root / "latest").readlink() == Path("step_00000003")


def load_from_own_root(team: Team, roots: list[Path]) -> str:
    with pytest.raises(CheckpointError) as raised:
        team.checkpointer(roots[team.rank]).load_newest()
    return str(raised.value)


def test_damage_that_only_one_node_sees_condemns_no_checkpoint(root: Path, two_checkpoints: Path) -> None:
    other = root.with_name("as another node sees it")
    for copy in (root, other):
        shutil.copytree(two_checkpoints, copy, symlinks=True)
    flip_a_byte(other / "step_00000002" / "rank_00000.bin")
    for message in on_ranks(2, load_from_own_root, [root, other]):
        assert "good on rank 0" in message
        assert "rank 1" in message
    assert Store(root).steps() == [2, 1]


def test_a_file_that_a_shared_file_system_shows_late_is_waited_for(root: Path) -> None:
    Checkpointer(Store(root)).save(1, {"x": torch.ones(3)}).wait()
    late = root / "step_00000001" / "rank_00000.bin"
    late.rename(root / "hidden")
    threading.Timer(0.3, (root / "hidden").rename, (late,)).start()
    assert Store(root, missing_seconds=10.0).verify(1) == []


def load_into_a_wrong_shape(team: Team, root: Path) -> str:
    mesh = DeviceMesh.from_group(team.group, "cpu")
    with pytest.raises(CheckpointError) as raised:
        team.checkpointer(root).load_newest({"model": {"rows": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])}})
    return str(raised.value)


def test_a_model_of_another_shape_is_an_error_and_no_damage(root: Path) -> None:
    Checkpointer(Store(root)).save(1, {"model": {"rows": torch.ones(5, 4)}}).wait()
    for message in on_ranks(2, load_into_a_wrong_shape, root):
        assert "is whole but cannot be loaded" in message
        assert "model/rows" in message
    assert Store(root).steps() == [1]


# Interruptions and failures


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(store: Store) -> None:
    Checkpointer(store).save(1, {"x": torch.ones(3)}).wait()
    store.path(1).rename(store.root / ".replaced_step_00000001")
    loaded = Checkpointer(store).load_newest()
    assert loaded is not None
    assert loaded.step == 1


def test_a_step_saved_again_replaces_the_checkpoint(store: Store) -> None:
    checkpointer = Checkpointer(store)
    for value in (1, 2):
        checkpointer.save(5, {"x": value}).wait()
    loaded = checkpointer.load_newest()
    assert loaded is not None
    assert loaded.shared == {"x": 2}
    assert sorted(path.name for path in store.root.iterdir()) == ["latest", "step_00000005"]


def save_with_rank_1_out_of_space(team: Team, root: Path) -> list[str | None]:
    checkpointer = team.checkpointer(root)
    state = {"x": [torch.ones(1_000_000), torch.ones(1_000_000)]}
    errors = [checkpointer.save(1, state).outcome().error]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if team.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    errors.append(checkpointer.save(2, state).outcome().error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    errors.append(checkpointer.save(3, state).outcome().error)
    return [error and str(error) for error in errors]


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_and_the_next_one_works(root: Path) -> None:
    for first, second, third in on_ranks(2, save_with_rank_1_out_of_space, root):
        assert first is None
        assert "step 2 was not written: rank 1: OSError" in second
        assert third is None
    assert Store(root).steps() == [3, 1]
    assert Store(root).verify(1) == Store(root).verify(3) == []
    assert list(root.glob(".*step_*")) == []


def test_a_full_disk_leaves_the_old_checkpoint_and_no_rest(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(tmp_path), b"tmpfs", 0, b"size=6m") != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        checkpointer = Checkpointer(Store(tmp_path / "checkpoints"))
        checkpointer.save(1, {"x": torch.ones(1_000_000)}).wait()
        failed = checkpointer.save(2, {"x": torch.ones(1_000_000)})
        assert "No space left" in str(failed.outcome().error)
        with pytest.raises(CheckpointError, match="step 2 was not written"):
            failed.wait()
        assert checkpointer.store.steps() == [1]
        assert checkpointer.store.verify(1) == []
        assert list((tmp_path / "checkpoints").glob(".*step_*")) == []
        checkpointer.save(3, {"x": torch.ones(300_000)}).wait()
        assert checkpointer.store.steps() == [3, 1]
    finally:
        libc.umount2(bytes(tmp_path), 2)


def save_with_a_lambda_on_rank_1(team: Team, root: Path) -> list[str | None]:
    checkpointer = team.checkpointer(root)
    bad = {"x": torch.ones(3), "function": (lambda: 0) if team.rank == 1 else 0}
    different = {"x": torch.ones(3 + team.rank)}
    missing = {} if team.rank == 1 else {"y": torch.ones(3)}
    saves = [checkpointer.save(step, state) for step, state in enumerate([{"s": bad}, {"s": different}, missing, {}])]
    return [str(save.outcome().error) for save in saves]


def test_a_state_that_cannot_be_saved_is_reported_by_all_ranks(root: Path) -> None:
    for messages in on_ranks(2, save_with_a_lambda_on_rank_1, root):
        assert "rank 1: the state cannot be copied" in messages[0]
        assert "not the same on rank 0 and rank 1" in messages[1]
        assert "not the same on rank 0 and rank 1" in messages[2]
        assert messages[3] == "None"
    assert Store(root).steps() == [3]


def save_while_rank_1_dies(team: Team, root: Path) -> str | None:
    checkpointer = team.checkpointer(root)
    checkpointer.save(1, {"x": torch.ones(10)}).wait()
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(checkpointer.save(2, {"x": torch.ones(10)}).outcome(timeout=30).error)


def test_a_dead_peer_fails_the_save_and_hangs_nobody(root: Path) -> None:
    message, _ = on_ranks(2, save_while_rank_1_dies, root)
    assert "step 2 was not written" in message
    assert Store(root).steps() == [1]


def test_an_attempt_that_lost_the_run_publishes_nothing(store: Store) -> None:
    owner = [True]
    checkpointer = Checkpointer(store, may_publish=lambda: owner[0])
    checkpointer.save(1, {"x": 1}).wait()
    owner[0] = False
    assert "another attempt owns the run" in str(checkpointer.save(2, {"x": 1}).outcome().error)
    assert [path.name for path in store.root.iterdir() if path.name != "latest"] == ["step_00000001"]


# Off the hot path


def test_the_training_may_change_its_tensors_as_soon_as_save_returns(root: Path) -> None:
    checkpointer = Checkpointer(Store(root))
    tensor, numbers = torch.zeros(4_000_000), [0]
    for step in range(1, 4):
        checkpointer.save(step, {"state": {"tensor": tensor, "numbers": numbers}})
        tensor += 1
        numbers[0] += 1
    loaded = checkpointer.load_newest()
    assert loaded is not None
    assert loaded.step == 3
    assert loaded.shared["state"]["numbers"] == [2]
    assert bool((loaded.shared["state"]["tensor"] == 2).all())


def test_host_memory_is_reused_until_the_state_changes_its_layout() -> None:
    buffers = HostBuffers()
    state = {"a": torch.ones(1000), "b": torch.ones((), dtype=torch.bfloat16), "c": torch.ones(3, 0)}
    first = {key: copy.data_ptr() for key, copy in buffers.copy(state).items()}
    again = buffers.copy({key: tensor * 2 for key, tensor in state.items()})
    assert {key: copy.data_ptr() for key, copy in again.items()} == first
    assert again["a"].sum() == 2000
    assert buffers.copy({"a": torch.ones(2000)})["a"].sum() == 2000


def memory_after_saves(team: Team, root: Path) -> list[int]:
    checkpointer = team.checkpointer(root)
    state = {"x": torch.ones(8 << 20), "y": [torch.ones(100) for _ in range(100)]}
    resident = []
    for step in range(12):
        checkpointer.save(step, state).wait()
        checkpointer.wait()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * resource.getpagesize())
    return resident


def test_many_saves_take_no_more_memory_than_a_few(root: Path) -> None:
    (resident,) = on_ranks(1, memory_after_saves, root)
    assert max(resident[3:]) - resident[2] < 8 << 20


def test_a_save_under_way_is_finished_before_the_next_and_before_a_load(root: Path) -> None:
    checkpointer = Checkpointer(Store(root), keep=10)
    ended: list[int] = []
    saves = [
        checkpointer.save(step, {"x": torch.ones(1_000_000)}, on_done=lambda saved: ended.append(saved.step))
        for step in range(1, 5)
    ]
    assert [save.outcome(timeout=0).error for save in saves[:3]] == [None] * 3
    checkpointer.wait()
    assert ended == [1, 2, 3, 4]
    assert checkpointer.store.steps() == [4, 3, 2, 1]


def test_extra_is_asked_for_at_the_end_and_is_in_the_manifest(store: Store) -> None:
    checkpointer = Checkpointer(store)
    checkpointer.save(1, {"x": 1}, extra=lambda: {"tensorboard": {"events": 123}}).wait()
    loaded = checkpointer.load_newest()
    assert loaded is not None
    assert loaded.manifest.extra == {"tensorboard": {"events": 123}}


def test_a_failing_callback_does_not_end_the_training(store: Store) -> None:
    checkpointer = Checkpointer(store)

    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("of the caller")

    assert "RuntimeError: of the caller" in str(checkpointer.save(1, {"x": 1}, extra=fail).outcome().error)
    assert checkpointer.save(2, {"x": 1}, on_done=fail).outcome().error is None
    assert store.steps() == [2]


# The store alone


def test_only_the_newest_few_are_kept(store: Store) -> None:
    checkpointer = Checkpointer(store, keep=2)
    for step in range(1, 6):
        checkpointer.save(step, {"x": torch.ones(10)})
    checkpointer.close()
    assert store.steps() == [5, 4]
    assert store.retain(0) == [4]
    assert store.steps() == [5], "the newest is never removed"
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpointer(store, keep=0)


def test_a_checkpoint_is_set_aside_under_a_free_name(store: Store) -> None:
    for _ in range(3):
        store.path(1).mkdir(parents=True)
        store.set_aside(1, "for a reason")
    assert sorted(path.name for path in store.root.iterdir()) == [
        "step_00000001.corrupt",
        "step_00000001.corrupt-2",
        "step_00000001.corrupt-3",
    ]
    assert store.steps() == []


def test_clean_removes_what_dead_attempts_left_and_nothing_else(store: Store) -> None:
    Checkpointer(store).save(1, {"x": 1}).wait()
    Store(store.root, attempt="dead").stage(2)
    (store.root / ".trash_step_00000000.dead").mkdir()
    store.clean()
    assert sorted(path.name for path in store.root.iterdir()) == ["latest", "step_00000001"]
    assert store.verify(1) == []


def test_a_manifest_survives_json_and_no_edit(tmp_path: Path) -> None:
    manifest = Manifest(3, 2, {"a": FileDigest(1, 2)}, {"note": "ä"})
    value = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(value) == manifest
    value["files"]["a"]["crc32"] += 1
    with pytest.raises(ValueError, match="checksum"):
        Manifest.from_json(value)


def test_a_step_of_more_than_eight_digits_is_found(store: Store) -> None:
    for step in (5, 123_456_789):
        store.path(step).mkdir(parents=True)
    assert store.steps() == [123_456_789, 5]


def test_a_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456789")
    assert digest_of(tmp_path / "file") == FileDigest(9, 0xCBF43926)
    data = os.urandom((9 << 20) + 5)  # several blocks
    (tmp_path / "file").write_bytes(data)
    assert digest_of(tmp_path / "file") == FileDigest(len(data), zlib.crc32(data))
    (tmp_path / "file").write_bytes(b"")
    assert digest_of(tmp_path / "file") == FileDigest(0, 0)


def test_the_store_needs_no_torch() -> None:
    source = "import sys, jobkit.checkpoint.store; assert 'torch' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", source]) == 0
