"""ctx.boundary: a loop that is not jobkit's saves files of its own, stops with all ranks, and goes on where it was."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import summary

from jobkit.checkpoint.store import Store
from jobkit.run.rundir import RunDir


def state_file(folder: Path, rank: int) -> Path:
    return folder / "parts" / f"{rank}.txt"


def loop(ctx: Any, total: int, stop_at: int | None = None, fail_at: int | None = None) -> list[float]:
    """A framework's loop: its state is a number for each rank, which depends on every random number drawn before."""
    step, value = 0, 0.0
    if ctx.checkpoint is not None:
        step, value = ctx.step, float(state_file(ctx.checkpoint, ctx.rank).read_text())

    def save(folder: Path) -> None:
        if ctx.step == fail_at and ctx.rank == ctx.world_size - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state_file(folder, ctx.rank).parent.mkdir(exist_ok=True)
        state_file(folder, ctx.rank).write_text(repr(value))
        random.random()  # what a save draws is not the training's

    ctx.boundary(step, save, total=total)
    drawn = []
    while step < total:
        if stop_at is not None:
            stop_after(ctx, stop_at)
        value += random.random() + float(torch.rand(())) * (ctx.rank + 1)
        drawn.append(value)
        step += 1
        ctx.boundary(step, save, total=total)
    return drawn


def run_of(runs: Path) -> RunDir:
    return RunDir(next(one for one in runs.iterdir() if (one / "events.jsonl").exists()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_ones_own_goes_on_with_its_files_and_random_numbers(tmp_path: Path, ranks: int) -> None:
    whole = attempt(ranks, tmp_path / "whole", loop, 6)
    assert attempt(ranks, tmp_path / "runs", loop, 6, 3) == [STOPPED] * ranks
    checkpoint = run_of(tmp_path / "runs").checkpoints / "step_00000004"
    assert sorted(Store(checkpoint.parent).manifest(4).files)[:ranks] == [f"files/parts/{n}.txt" for n in range(ranks)]
    rest = attempt(ranks, tmp_path / "runs", loop, 6)
    assert [one[4:] for one in whole] == rest


def test_files_that_are_damaged_send_the_run_to_the_checkpoint_before(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, loop, 8, 2) == [STOPPED]
    assert attempt(1, tmp_path, loop, 8, 5) == [STOPPED]
    checkpoints = run_of(tmp_path).checkpoints
    (checkpoints / "step_00000006" / "files" / "parts" / "0.txt").write_text("9.9")
    assert len(attempt(1, tmp_path, loop, 8)[0]) == 5
    assert (checkpoints / "step_00000006.corrupt").exists()


def test_a_disk_that_does_not_take_the_files_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, loop, 8, 2) == [STOPPED] * 2
    assert attempt(2, tmp_path, loop, 8, 5, 6) == [STOPPED] * 2
    assert Store(run_of(tmp_path).checkpoints).steps() == [3]
    assert not list(run_of(tmp_path).checkpoints.glob(".staging*"))


def fails_to_save(ctx: Any, kind: str) -> None:
    def save(folder: Path) -> None:
        if kind == "torch":
            torch.save(torch.ones(1 << 16), Path("/dev/full"))
        if ctx.rank == ctx.world_size - 1:
            raise ValueError("a fault of the save")

    ctx.boundary(0, save)
    ctx._loop._checkpoints.save(ctx._loop.place, write_files=save, wait=True, must=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_raises_ends_the_run_with_its_error_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    with pytest.raises(AssertionError, match="a fault of the save"):
        attempt(ranks, tmp_path, fails_to_save, "value")


def test_torchs_own_words_for_a_full_disk_are_those_of_a_full_disk(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, fails_to_save, "torch") == [None]
    assert Store(run_of(tmp_path).checkpoints).steps() == [0]  # that of finish, without the files


def begin_at(ctx: Any, step: int) -> None:
    ctx.boundary(step, lambda folder: (folder / "state").write_text("1"))


def test_the_first_boundary_is_where_the_run_stands(tmp_path: Path) -> None:
    [message] = attempt(1, tmp_path, begin_at, 1)
    assert message == "UsageError: ctx.boundary(1): the run begins, so the first call is ctx.boundary(0), " + (
        "before the first step"
    )
    assert attempt(1, tmp_path, loop, 8, 2) == [STOPPED]
    [message] = attempt(1, tmp_path, begin_at, 0)
    assert message.startswith("UsageError: ctx.boundary(0): step_00000003 is of step 3: load what ctx.checkpoint holds")


def goes_back(ctx: Any) -> None:
    begin_at(ctx, 0)
    begin_at(ctx, 2)
    begin_at(ctx, 1)


def test_steps_only_go_up(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, goes_back) == ["UsageError: ctx.boundary(1): 2 steps are done; steps only go up"]


def draws_first(ctx: Any, seen: Path, stop_at: int | None = None) -> list[float]:
    """What a script without a seed draws before its loop, as the split of a dataset, and in it."""
    with seen.open("a") as file:
        file.write(f"{random.random()}\n")
    return loop(ctx, 4, stop_at)


def test_a_script_that_keeps_its_random_numbers_draws_the_same_before_its_loop(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    assert attempt(1, tmp_path / "runs", draws_first, seen, 1, config="seed: null\n") == [STOPPED]
    [rest] = attempt(1, tmp_path / "runs", draws_first, seen, config="seed: null\n")
    assert len(rest) == 2
    first, again = seen.read_text().splitlines()
    assert first == again


def logs_first(ctx: Any, stop_at: int | None = None) -> list[float]:
    """What a framework logs before its loop begins, of each kind."""
    ctx.log({"scalar": 1.0})
    ctx.log({"placed": 1.0}, step=0)
    ctx.log_text("text", "words")
    ctx.log_summary(summary.scalar("summary", 1.0, new_style=True), step=0)
    return loop(ctx, 4, stop_at)


def test_what_is_logged_before_the_loop_is_logged_by_one_attempt(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, logs_first, 1) == [STOPPED]
    attempt(1, tmp_path, logs_first)
    files = run_of(tmp_path).tensorboard.glob("events.out.tfevents.*")
    logged = [
        value.tag for file in files for event in EventFileLoader(str(file)).Load() for value in event.summary.value
    ]
    own = [tag for tag in logged if tag.split("/")[0] in ("scalar", "placed", "text", "summary")]
    assert sorted(own) == ["placed", "scalar", "summary", "text/text_summary"]
