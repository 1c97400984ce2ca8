"""The index of a checkpoint: what its columns say is what DCP's Metadata beside them says, and is used first."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from jobkit.checkpoint import index as index_module
from jobkit.checkpoint.index import INDEX, Index, parse_index, parse_metadata
from jobkit.checkpoint.store import Store, digest_of
from jobkit.checkpoint.writer import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHT = torch.arange(35, dtype=torch.float32).view(7, 5)
SMALL = {f"bias {number}": torch.full((number % 3,), float(number)) for number in range(50)}


def state(team: Team) -> dict[str, Any]:
    """Sharded, replicated, equal, empty, and of no dimension; a tree without a tensor."""
    mesh = DeviceMesh.from_group(team.group, "cpu") if team.group is not None else None
    weight = WEIGHT.clone() if mesh is None else distribute_tensor(WEIGHT, mesh, [Shard(0)])
    half = torch.ones(3, dtype=torch.bfloat16)
    return {"model": {"weight": weight, **SMALL, "half/": half, "number": torch.tensor(3)}, "schedule": {"lr": 0.1}}


def save(team: Team, root: Path) -> None:
    for step in (1, 2):
        team.checkpointer(root).save(step, state(team), {"rank": torch.tensor(team.rank)}).wait()


def load(team: Team, root: Path) -> tuple[int, list[str]]:
    """The step, and what of it is not as it was saved."""
    template = {"weight": torch.zeros(7, 5)}
    if team.group is not None:
        mesh = DeviceMesh.from_group(team.group, "cpu")
        template = {"weight": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)])}
    loaded = team.checkpointer(root).load_newest({"model": template})
    assert loaded is not None and loaded.shared["schedule"] == {"lr": 0.1}
    found = loaded.shared["model"]
    if isinstance(found["weight"], DTensor):
        assert found["weight"] is template["weight"]
        found["weight"] = found["weight"].full_tensor()
    expected = {**state(Team(0, 1, None))["model"], "weight": WEIGHT}
    assert list(found) == list(expected) and loaded.contents["schedule"] == {}
    assert loaded.contents["model"]["weight"] == (WEIGHT.shape, WEIGHT.dtype)
    return loaded.step, [key for key, value in expected.items() if not torch.equal(found[key], value)]


def rewrite(checkpoint: Path, change: Callable[[bytes], bytes]) -> None:
    """Change an index, with the checksums of the new one."""
    (checkpoint / INDEX).write_bytes(change((checkpoint / INDEX).read_bytes()))
    store = Store(checkpoint.parent)
    manifest = store.manifest(int(checkpoint.name.removeprefix("step_")))
    files = manifest.files | {INDEX: digest_of(checkpoint / INDEX)}
    (checkpoint / "manifest.json").write_text(json.dumps(replace(manifest, files=files).to_json()))


def without_columns(data: bytes) -> bytes:
    """As a jobkit wrote it that had none."""
    _, _, columns_at = index_module._END.unpack(data[-index_module._END.size :])
    return data[:columns_at]


def as_written_at_first(data: bytes) -> bytes:
    """In one pickle, a record for each tensor of its own."""
    plain = pickle.Pickler(buffer := io.BytesIO())
    plain.fast = True  # nothing is written as a reference to what was written before
    plain.dump(parse_metadata(data))
    return buffer.getvalue()


def says(index: Index) -> tuple[Any, ...]:
    return list(index.tensors.items()), index.divided, index.objects, index.chunks, list(index.trees.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_columns_say_what_the_metadata_says(tmp_path: Path, ranks: int) -> None:
    on_ranks(ranks, save, tmp_path)
    data = (tmp_path / "step_00000002" / INDEX).read_bytes()
    told = parse_index(data)
    assert says(told) == says(Index.of(parse_metadata(data))) == says(parse_index(without_columns(data)))
    assert says(told) == says(parse_index(as_written_at_first(data)))
    assert told.divided == ({"shared.model/weight"} if ranks > 1 else set())
    assert len(told.tensors) == 53 + ranks and len(told.objects) == 2 + ranks


@pytest.mark.parametrize("older", [without_columns, as_written_at_first])
@pytest.mark.parametrize(("savers", "loaders"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_a_checkpoint_of_a_jobkit_without_columns_is_restored(
    tmp_path: Path, savers: int, loaders: int, older: Callable[[bytes], bytes]
) -> None:
    on_ranks(savers, save, tmp_path)
    assert on_ranks(loaders, load, tmp_path) == [(2, [])] * loaders
    rewrite(tmp_path / "step_00000002", older)
    assert on_ranks(loaders, load, tmp_path) == [(2, [])] * loaders


class RunsCode:
    """Pickled, it makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.file}",)


def save_alone(root: Path) -> Checkpointer:
    save(Team(0, 1, None), root)
    return Checkpointer(Store(root))


def test_columns_that_would_run_code_do_not_and_the_checkpoint_is_set_aside(tmp_path: Path) -> None:
    checkpointer = save_alone(tmp_path)

    def forge(data: bytes) -> bytes:
        end = data[-index_module._END.size :]
        return without_columns(data) + pickle.dumps(RunsCode(tmp_path / "ran")) + end

    rewrite(tmp_path / "step_00000002", forge)
    loaded = checkpointer.load_newest()
    assert loaded is not None and loaded.step == 1 and not (tmp_path / "ran").exists()
    assert checkpointer.set_aside == [(2, "index.pickle names posix.system, which no index has")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_metadata_that_would_run_code_beside_true_columns_does_not(tmp_path: Path, ranks: int) -> None:
    """Where something is sharded DCP needs it, and the checkpoint is set aside; else it is not read."""
    on_ranks(ranks, save, tmp_path)

    def forge(data: bytes) -> bytes:
        _, objects_at, columns_at = index_module._END.unpack(data[-index_module._END.size :])
        metadata, objects = pickle.dumps(RunsCode(tmp_path / "ran")), data[objects_at:columns_at]
        columns = data[columns_at : -index_module._END.size]
        end = index_module._END.pack(index_module._MAGIC, len(metadata), len(metadata) + len(objects))
        return metadata + objects + columns + end

    rewrite(tmp_path / "step_00000002", forge)
    checkpointer = Checkpointer(Store(tmp_path))
    loaded = checkpointer.load_newest()
    assert loaded is not None and torch.equal(loaded.shared["model"]["weight"], WEIGHT)
    named = "index.pickle names posix.system, which no index has"
    assert checkpointer.set_aside == ([(2, named)] if ranks > 1 else [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [-1, -len("columns1") - 20, 0])
def test_an_index_whose_columns_are_torn_is_set_aside(tmp_path: Path, keep: int) -> None:
    checkpointer = save_alone(tmp_path)
    file = tmp_path / "step_00000002" / INDEX
    file.write_bytes(without_columns(file.read_bytes()) if keep == 0 else file.read_bytes()[:keep])
    loaded = checkpointer.load_newest()
    assert loaded is not None and loaded.step == 1
    [(step, reason)] = checkpointer.set_aside
    assert step == 2 and reason.startswith("index.pickle has ")


def test_the_columns_of_another_checkpoint_are_not_taken(tmp_path: Path) -> None:
    """They are one file with the metadata, under one checksum."""
    checkpointer = save_alone(tmp_path)
    checkpointer.save(3, {"model": {"other": torch.zeros(3)}}).wait()
    one, other = (tmp_path / f"step_0000000{step}" / INDEX for step in (3, 2))
    one.write_bytes(without_columns(one.read_bytes()) + other.read_bytes()[len(without_columns(other.read_bytes())) :])
    loaded = checkpointer.load_newest()
    assert loaded is not None and loaded.step == 2
    assert [step for step, _ in checkpointer.set_aside] == [3]
