"""Checkpoints after kill -9 at every operation on their files, on one rank and on one of two, and at any moment.

tests/ranks/test_checkpoint_damage.py kills at some of them.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from harness.checkpoint_kills import (
    KillPoint,
    Plan,
    kill_one_attempt_and_the_next,
    kill_one_of_two_ranks,
    run,
    untidy,
)
from harness.ranks import start, wait_for_end, warm_parent

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(("within_write", "least"), [(False, 100), (True, 15)])
def test_an_attempt_and_the_next_one_killed_at_any_file_operation_lose_nothing(
    tmp_path: Path, within_write: bool, least: int
) -> None:
    for number in itertools.count(1):
        if not kill_one_attempt_and_the_next(tmp_path / str(number), number, within_write):
            break
    assert number > least, "kill points"


@pytest.mark.parametrize(("rank", "within_write", "every"), [(0, False, 5), (0, True, 2), (1, False, 1), (1, True, 1)])
def test_a_rank_killed_at_any_file_operation_loses_nothing_and_hangs_nobody(
    tmp_path: Path, rank: int, within_write: bool, every: int
) -> None:
    for number in itertools.count(1, every):
        if not kill_one_of_two_ranks(tmp_path / str(number), KillPoint(rank, number, within_write)):
            break
    assert number >= 10, "kill points"


def test_kill_9_while_damage_is_set_aside_leaves_none_in_use_and_none_unnamed(tmp_path: Path) -> None:
    four = tmp_path / "four"
    run(Plan(four, dict.fromkeys([1, 2, 3, 4], 1), keep=4, ranks=2))
    index = four / "step_00000004" / "index.pickle"
    index.write_bytes(bytes(index.stat().st_size))
    (four / "step_00000003" / "manifest.json").unlink()
    for number in itertools.count(1):
        root = four.with_name(str(number))
        shutil.copytree(four, root, symlinks=True)
        (first,) = run(Plan(root, {}), KillPoint(0, number))
        if not first.killed:
            break
        (second,) = run(Plan(root, {11: 1}, attempt="2"))
        assert (second.loaded, second.durable, second.problem) == (2, 11, ""), root
        assert untidy(root) == ["step_00000003.corrupt", "step_00000004.corrupt"]
        assert "manifest.json is missing" in (root / "step_00000003.corrupt" / "REASON").read_text()
        assert "index.pickle has checksum" in (root / "step_00000004.corrupt" / "REASON").read_text()
    assert number > 20, "kill points"


def save_for_ever(root: Path) -> None:
    torch.set_num_threads(1)
    checkpointer = Checkpointer(Store(root, attempt=str(os.getpid())), keep=2)
    step = max(checkpointer.store.steps(), default=1)
    while True:
        checkpointer.save(step, {"x": [torch.full((300_000,), step), step]}, step).wait()
        step += 1


def test_the_newest_checkpoint_is_whole_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    moments = random.Random(os.getpid())
    reached = 0
    for _ in range(15):
        saver = start(save_for_ever, root)
        deadline = time.monotonic() + 30
        while max(Store(root).steps(), default=0) <= reached and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.1))
        warm_parent().signal("KILL", [saver])
        assert wait_for_end(saver)

        checkpointer = Checkpointer(Store(root, missing_seconds=0.0))
        loaded = checkpointer.load_newest()
        assert checkpointer.set_aside == []
        assert loaded is not None
        tensor, step = loaded.shared["x"]
        assert loaded.step == loaded.local == step > reached
        assert bool((tensor == step).all())
        reached = step
    Store(root).clean()
    assert sorted(path.name for path in root.glob(".*step_*")) == []


def flip_a_bit(path: Path, position: int = 99) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, missing_seconds=0.0)
    Checkpointer(store).save(1, {"x": [1, torch.ones(3)]}).wait()
    for path in store.path(1).iterdir():
        for position in range(path.stat().st_size):
            flip_a_bit(path, position)
            assert store.verify(1) != [], f"byte {position} of {path.name}"
            flip_a_bit(path, position)  # back
    assert store.verify(1) == []
