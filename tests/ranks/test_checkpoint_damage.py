"""Checkpoints after kill -9 at some operations on their files, and after every kind of damage to them.

tests/soak/test_checkpoint_kills.py kills at each operation.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.checkpoint_kills import (
    KillPoint,
    Plan,
    kill_one_attempt_and_the_next,
    kill_one_of_two_ranks,
    read,
    run,
    state,
    untidy,
    version_of,
)
from harness.other_user import NOBODY, only_root
from harness.ranks import Team, on_ranks
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from jobkit.checkpoint.index import INDEX, ForeignIndex, read_metadata
from jobkit.checkpoint.store import Store, digest_of
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# Killed


@pytest.mark.parametrize(
    ("number", "within_write"), [(n, False) for n in range(3, 96, 9)] + [(n, True) for n in (1, 5, 9, 12)]
)
def test_an_attempt_and_the_next_one_killed_at_a_file_operation_lose_nothing(
    tmp_path: Path, number: int, within_write: bool
) -> None:
    assert kill_one_attempt_and_the_next(tmp_path / "checkpoints", number, within_write)


@pytest.mark.parametrize("point", [KillPoint(0, 40), KillPoint(0, 5, True), KillPoint(1, 4), KillPoint(1, 2, True)])
def test_a_rank_killed_at_a_file_operation_loses_nothing_and_hangs_nobody(tmp_path: Path, point: KillPoint) -> None:
    assert kill_one_of_two_ranks(tmp_path / "checkpoints", point)


# Damaged


@pytest.fixture(scope="module")
def four_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four") / "checkpoints"
    run(Plan(root, dict.fromkeys([1, 2, 3, 4], 1), keep=4, ranks=2))
    return root


@pytest.fixture
def four(four_of_two_ranks: Path, tmp_path: Path) -> Path:
    """Versions 1 to 4 as steps 1 to 4."""
    return Path(shutil.copytree(four_of_two_ranks, tmp_path / "checkpoints", symlinks=True))


def tear(path: Path) -> None:
    """Zero what a lost power supply did not let through."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


def flip_a_bit(path: Path, position: int = 99) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def take_that_of_the_step_before(path: Path) -> None:
    shutil.copy(path.parent.with_name("step_00000003") / path.name, path)


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def remove_all_files(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def make_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no directory\n")


DAMAGES = [
    ("rank_00000.bin", tear, "rank_00000.bin has checksum"),
    ("rank_00001.bin", empty, "rank_00001.bin has 0 bytes"),
    ("rank_00001.bin", take_that_of_the_step_before, "rank_00001.bin has checksum"),
    ("rank_00001.bin", make_a_directory, "rank_00001.bin cannot be read: Is a directory"),
    ("rank_00000.bin", make_a_dangling_link, "rank_00000.bin is missing"),
    ("index.pickle", tear, "index.pickle has checksum"),
    ("index.pickle", empty, "index.pickle has 0 bytes"),
    ("index.pickle", Path.unlink, "index.pickle is missing"),
    ("manifest.json", tear, "manifest.json is not valid"),
    ("manifest.json", flip_a_bit, "manifest.json is not valid"),
    ("manifest.json", empty, "manifest.json is not valid"),
    ("manifest.json", take_that_of_the_step_before, "manifest.json is that of step 3"),
    ("manifest.json", make_a_directory, "manifest.json cannot be read: Is a directory"),
    ("", remove_all_files, "manifest.json is missing"),
    ("", make_a_file, "manifest.json is missing"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_damage_is_set_aside_and_named_and_the_checkpoint_before_is_used(
    four: Path, file: str, damage: Callable[[Path], None], reason: str
) -> None:
    damage(four / "step_00000004" / file)
    checkpointer = Checkpointer(Store(four, missing_seconds=0.0), keep=4)
    assert version_of(checkpointer.load_newest()) == 3
    [(step, named)] = checkpointer.set_aside
    assert step == 4
    assert reason in named
    assert (four / "latest").readlink() == Path("step_00000003")
    if (four / "step_00000004.corrupt").is_dir():
        assert (four / "step_00000004.corrupt" / "REASON").read_text() == named + "\n"
    checkpointer.save(4, state(5)).wait()
    assert version_of(checkpointer.load_newest()) == 5
    assert untidy(four) == ["step_00000004.corrupt"]


def test_the_two_newest_damaged_at_once_are_both_set_aside(four: Path) -> None:
    empty(four / "step_00000004" / "manifest.json")
    tear(four / "step_00000003" / "rank_00001.bin")
    for rank, ended in enumerate(run(Plan(four, {11: 1}, ranks=2))):
        assert (ended.loaded, ended.local, ended.durable) == (2, {"rank": rank, "version": 2}, 11)
        assert [step for step, _ in ended.set_aside] == [4, 3]
    assert untidy(four) == ["step_00000003.corrupt", "step_00000004.corrupt"]
    assert read(four) == 11


def test_where_all_are_damaged_the_run_stops_names_them_and_does_not_start_from_nothing(four: Path) -> None:
    tear(four / "step_00000001" / "manifest.json")
    (four / "step_00000002" / "index.pickle").unlink()
    make_a_file(four / "step_00000003")
    empty(four / "step_00000004" / "rank_00001.bin")
    before = sorted(four.iterdir())
    for _ in range(2):  # nor does the next start
        with pytest.raises(CheckpointError, match="--fresh") as refused:
            Checkpointer(Store(four, missing_seconds=0.0)).load_newest()
        for named in ("step 4: rank_00001.bin has 0 bytes", "step 3: manifest.json is missing", "step 2", "step 1"):
            assert named in str(refused.value)
    assert sorted(four.iterdir()) == before
    assert all("none of the checkpoints" in problem for problem in on_ranks(2, why_it_stops, four))


def why_it_stops(team: Team, root: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        team.checkpointer(root).load_newest()
    return str(refused.value)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, missing_seconds=0.0)
    Checkpointer(store).save(1, {"x": [1, torch.ones(3)]}).wait()
    for path in store.path(1).iterdir():
        for position in range(0, path.stat().st_size, 29):
            flip_a_bit(path, position)
            assert store.verify(1) != [], f"byte {position} of {path.name}"
            flip_a_bit(path, position)  # back
    assert store.verify(1) == []


def test_a_checkpoint_that_became_a_file_during_the_run_is_replaced_and_removed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(Store(tmp_path, missing_seconds=0.0), keep=1)
    for version, step in ((1, 1), (2, 1), (3, 1), (4, 2)):
        checkpointer.save(step, state(version)).wait()
        checkpointer.wait()
        assert untidy(tmp_path) == []
        assert read(tmp_path) == version
        make_a_file(tmp_path / f"step_{step:08d}")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_something_else_called_latest_does_not_matter(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "latest")
    checkpointer = Checkpointer(Store(tmp_path))
    for version in (1, 2):
        checkpointer.save(version, state(version)).wait()
        checkpointer.wait()
        assert read(tmp_path) == version
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001", "step_00000002"}


# Forged: with checksums that are right


class RunsCode:
    """Pickled, it makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.file}",)


def forge_index(checkpoint: Path, value: object) -> None:
    (checkpoint / INDEX).write_bytes(pickle.dumps(value))
    store = Store(checkpoint.parent)
    manifest = store.manifest(int(checkpoint.name.removeprefix("step_")))
    files = manifest.files | {INDEX: digest_of(checkpoint / INDEX)}
    (checkpoint / "manifest.json").write_text(json.dumps(replace(manifest, files=files).to_json()))


def test_an_index_that_would_run_code_does_not_and_is_set_aside_with_its_name(four: Path) -> None:
    forge_index(four / "step_00000004", RunsCode(four / "ran"))
    for ended in run(Plan(four, {11: 1}, ranks=2)):
        [(step, named)] = ended.set_aside
        assert (ended.loaded, step) == (3, 4)
        assert named == "index.pickle names posix.system, which no index has"
    assert not (four / "ran").exists()
    assert untidy(four) == ["step_00000004.corrupt"]


class ByGetattr:
    """Pickled as Python 3.11.2 pickles a member of an Enum, or whatever else."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_an_index_of_another_python_names_the_members_of_an_enum_by_getattr(four: Path) -> None:
    checkpoint = four / "step_00000004"
    index = read_metadata(checkpoint)
    preserve = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    index.planner_data = [ByGetattr(_MEM_FORMAT_ENCODING, preserve.name)]
    forge_index(checkpoint, index)
    assert read_metadata(checkpoint).planner_data == [preserve]
    for owner, name in ((torch.Size, "count"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")):
        index.planner_data = [ByGetattr(owner, name)]
        forge_index(checkpoint, index)
        with pytest.raises(ForeignIndex):
            read_metadata(checkpoint)


def test_nor_does_it_where_it_is_hidden_in_a_true_index(four: Path) -> None:
    index = read_metadata(four / "step_00000004")
    index.planner_data = [RunsCode(four / "ran")]
    forge_index(four / "step_00000004", index)
    checkpointer = Checkpointer(Store(four), keep=4)
    assert version_of(checkpointer.load_newest()) == 3
    with pytest.raises(ForeignIndex):
        read_metadata(four / "step_00000004.corrupt")
    assert not (four / "ran").exists()


@only_root
@pytest.mark.parametrize("file", ["rank_00001.bin", "index.pickle"])
def test_a_file_that_another_user_has_put_there_is_not_read(four: Path, file: str) -> None:
    os.chown(four / "step_00000004" / file, NOBODY, NOBODY)
    checkpointer = Checkpointer(Store(four), keep=4)
    assert version_of(checkpointer.load_newest()) == 3
    assert checkpointer.set_aside == [(4, f"{file} is not its run's owner's, but nobody's")]


@only_root
def test_root_goes_on_with_the_checkpoints_of_the_runs_owner(four: Path) -> None:
    for path in (four, *four.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    assert version_of(Checkpointer(Store(four), keep=4).load_newest()) == 4
