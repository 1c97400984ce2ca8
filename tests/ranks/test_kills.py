"""A process that is killed at any instant of a save leaves a state to go on from: the one before, or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.salvage import save_newest
from jobkit.checkpoint.staging import RankPosition
from jobkit.checkpoint.store import Store
from jobkit.wire.group import RankGroup

STRIDE = int(os.environ.get("JOBKIT_KILL_STRIDE", "9"))
"""Every so many calls of C functions a process is killed; 1 is each of them."""


def state(step: int) -> nn.Module:
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, step)
    return model


def entries(model: nn.Module) -> list[Entry]:
    return [Entry(name="model", live=model)]


def make(folder: Path, attempt: int, slots: tuple[int, int] | None = None) -> Checkpointer:
    return Checkpointer(folder, RankGroup.alone(), RankPosition(), attempt=attempt, keep=2, slots=slots)


def run_and_die(action: Callable[[], Any], at: int) -> bool:
    """Run an action in a child that is killed at its n-th call of a C function; True if it came to its end first."""
    child = os.fork()
    if child == 0:
        count = 0

        def look(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "c_call"
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(look)
        sys.setprofile(look)
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def check(checkpointer: Checkpointer, steps: tuple[int, ...]) -> None:
    restored = checkpointer.restored
    assert restored is not None
    assert restored.step in steps
    model = state(0)
    checkpointer.restore(entries(model))
    assert torch.equal(model.weight, torch.full((64, 64), float(restored.step)))
    assert checkpointer.set_aside == []
    checkpointer.close()


@pytest.mark.parametrize("trims", [False, True])
def test_a_kill_within_a_checkpoint(tmp_path: Path, trims: bool) -> None:
    base = tmp_path / "base"
    first = make(base, 1)
    for step in (1, 2) if trims else (2,):
        first.write(first.copy_to_host(step, entries(state(step)), {}), wait=True)
    first.close()

    def save(folder: Path) -> None:
        checkpointer = make(folder, 2)
        checkpointer.write(checkpointer.copy_to_host(3, entries(state(3)), {}), wait=True)
        checkpointer.close()

    at, is_over = 1, False
    while not is_over:
        folder = tmp_path / f"killed-{at}"
        shutil.copytree(base, folder, symlinks=True)
        is_over = run_and_die(lambda folder=folder: save(folder), at)  # type: ignore[misc]
        check(make(folder, 3), (2, 3))
        shutil.rmtree(folder)
        at += STRIDE
    assert at > 100


def test_a_kill_within_a_snapshot(tmp_path: Path) -> None:
    def snapshot(step: int, attempt: int, slots: tuple[int, int]) -> None:
        checkpointer = make(tmp_path / "empty", attempt, slots)
        checkpointer.snapshot(step, entries(state(step)), {}, 0)
        checkpointer.snapshots.wait()
        checkpointer.close()

    at, is_over = 1, False
    while not is_over:
        slots = os.memfd_create("first"), os.memfd_create("second")
        snapshot(2, 1, slots)
        is_over = run_and_die(lambda slots=slots: snapshot(3, 2, slots), at)  # type: ignore[misc]
        check(make(tmp_path / "empty", 3, slots), (2, 3))
        for slot in slots:
            os.close(slot)
        at += STRIDE
    assert at > 50


def test_a_kill_while_a_snapshot_becomes_a_checkpoint(tmp_path: Path) -> None:
    base, slots = tmp_path / "base", (os.memfd_create("first"), os.memfd_create("second"))
    first = make(base, 1, slots)
    for step in (1, 2):
        first.write(first.copy_to_host(step, entries(state(step)), {}), wait=True)
    first.snapshot(3, entries(state(3)), {}, 0)
    first.snapshots.wait()
    first.close()

    def save(folder: Path) -> None:
        store = Store(folder, "1.memory")
        assert save_newest(slots, RankGroup.alone(), store, keep=2, check_lease=lambda: None) == 3

    at, is_over = 1, False
    while not is_over:
        folder = tmp_path / f"killed-{at}"
        shutil.copytree(base, folder, symlinks=True)
        is_over = run_and_die(lambda folder=folder: save(folder), at)  # type: ignore[misc]
        check(make(folder, 2), (3,) if is_over else (2, 3))
        shutil.rmtree(folder)
        at += STRIDE
    assert at > 100
