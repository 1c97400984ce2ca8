"""Runs that nothing interrupts: what the others are compared with. Each is made once for all processes of a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from harness.project import Project, assert_each_step_once, status, weights

STEPS = 60
"""Of the toy task, as its YAML says."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled, in whichever process of this session came first."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = folder.with_suffix(".done")
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def train_uninterrupted(folder: Path, ranks: int) -> None:
    """Train the toy on this machine, on two simulated nodes where there is more than one rank."""
    project = Project(folder)
    nodes = min(ranks, 2)
    project.submit("--local", f"resources.nodes={nodes}", f"resources.tasks_per_node={ranks // nodes}")
    (run,) = project.runs
    assert status(run)["state"] == "finished"
    assert_each_step_once(run, STEPS, ranks)


def weights_of(factory: pytest.TempPathFactory, ranks: int) -> bytes:
    """The toy's weights after an uninterrupted training."""
    folder = made_once(factory, f"uninterrupted-{ranks}", lambda folder: train_uninterrupted(folder, ranks))
    return weights(Project(folder).runs[0])
