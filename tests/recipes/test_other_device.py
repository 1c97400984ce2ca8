"""A device that jobkit has no entry for, declared by a package: what runs there, and what is said of its memory.

The device is tests/standin_device, of torch's PrivateUse1 kind as NPUs are. It computes on the CPU, so nothing here is
about speed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import standin
from harness.project import Project, causes, describe, logged_steps, status, weights

ROOT = Path(__file__).parents[2]
STEPS = 6

TASK = """
import os
import signal

import torch

from experiments.minimind import train as minimind


def train(ctx):
    assert ctx.device.type == "standin" and ctx.device.index == ctx.local_rank
    steps = ctx.steps

    def killed_once(total):
        for step in steps(total):
            if step == 4 and ctx.attempt == ctx.params.killed_in and ctx.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.rand((), device=ctx.device)
            yield step

    ctx.steps = killed_once
    return {**minimind.train(ctx), "drawn": torch.rand((), device=ctx.device).item()}
"""

SMALL = [
    *("params.batch=4", "params.micro_batch=1", "params.length=16", "params.held_out=0.005"),
    *("params.model.dim=32", "params.model.layers=1", "params.model.hidden=32", "params.validate_every=3"),
    *(f"params.steps={STEPS}", "checkpoint.every=2", "checkpoint.memory=off", "watchdog=off"),
]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project where the device's package is installed."""
    project = Project(tmp_path / "project", standin.environment() | {"STANDIN_VISIBLE_DEVICES": "1,3"})
    project.env.pop("MINIMIND_DATA", None)
    return project


def test_a_recipe_that_is_killed_on_a_device_of_a_package_ends_with_the_same_bits(project: Project) -> None:
    shutil.copytree(ROOT / "experiments", project.path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    (project.path / "killed.py").write_text(TASK)
    device = ["device=standin", "resources.gpus_per_task=1", "resources.tasks_per_node=auto"]
    told = []
    for killed_in in (1, 0):
        arguments = ["task=killed:train", "name=killed", f"+params.killed_in={killed_in}", *device, *SMALL]
        told.append(project.jobkit("submit", "experiments/minimind.yaml", "--local", *arguments).stderr)
    runs = sorted(project.runs, key=lambda run: len(causes(run)))
    assert [causes(run) for run in runs] == [["finished"], ["killed", "finished"]], describe(runs[-1])
    first, last = (status(run)["attempts"][-1] for run in runs)
    assert first["first_step"] == 0 and last["first_step"] in (2, 4), "the newest checkpoint may not have been durable"
    assert "2 rank(s), standin_ccl, standin (stand-in), STANDIN_VISIBLE_DEVICES=1,3" in told[0]
    assert status(runs[0])["result"] == status(runs[1])["result"], "with what the device's own generator draws next"
    assert weights(runs[0]) == weights(runs[1])


FULL = """
import torch

from jobkit.worker import timing

timing.PERFORMANCE_SECONDS = 0.0  # a point a step


def train(ctx):
    for step in ctx.steps(3):
        if step == 2:
            torch.standin.set_memory_limit(1 << 20)
        kept = torch.empty(1 << 18, dtype=torch.float64, device=ctx.device)
"""


def test_a_device_whose_memory_is_full_is_named_with_its_peak(project: Project) -> None:
    (project.path / "mytask.py").write_text(FULL)
    device = ["device=standin", "resources={nodes: 1, tasks_per_node: 1, gpus_per_task: 1}"]
    project.submit("--local", *device, "retry.crash=0", expect=1)
    (run,) = project.runs
    assert causes(run) == ["out_of_memory"]
    error = status(run)["attempts"][-1]["failure"]["error"]
    assert "RuntimeError: STANDIN out of memory" in error and "(peak of the standin's memory: 0.00 GiB)" in error
    assert logged_steps(run, "perf/peak_memory_gib")
