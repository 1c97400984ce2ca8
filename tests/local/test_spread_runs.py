"""Whole runs whose model is spread over the ranks: stopped, continued on as many ranks, and on fewer."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness.project import Project, describe, logged_steps, status, step, wait_for
from safetensors.torch import load_file

STEPS = 40

TASK = f"""\
import time

import torch

from jobkit.train.optim import fused_ema_adam


def train(ctx):
    data = torch.utils.data.TensorDataset(torch.randn(100, 8))
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)) for _ in range(4)]
    model = ctx.parallelize(torch.nn.Sequential(*blocks))
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-2)
    loader = ctx.loader(data, global_batch_size=12)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps({STEPS}):
        (x,) = next(loader)
        loss = ctx.backward(model, x, torch.nn.functional.mse_loss, x, micro_batch_size=2)
        ctx.log({{"train/loss": loss, "train/norm": ctx.update(optimizer, max_norm=0.5)}})
        time.sleep(0.05 if ctx.attempt == 1 else 0)
"""


def difference(run: Path, other: Path) -> float:
    """The largest of any exported weight."""
    left, right = (load_file(one / "final" / "model.safetensors") for one in (run, other))
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [(["parallel=zero3"], 1e-5), (["parallel=pipeline", "precision=fp16"], 2e-3)],
    ids=["zero3", "fp16 in a pipeline"],
)
def test_a_spread_run_is_stopped_and_goes_on_here_or_on_fewer_ranks(
    tmp_path: Path, overrides: list[str], tolerance: float
) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    found = {}
    for name, then in (("whole", None), ("same", 2), ("fewer", 1)):
        named = [f"name={name}", "resources.nodes=1", *overrides]
        if then is not None:
            process = project.start("submit", "toy.yaml", "--local", *named, "resources.tasks_per_node=2")
            wait_for("a run directory", lambda: list(project.path.glob(f"runs/{name}-*")))  # noqa: B023
            (run,) = project.path.glob(f"runs/{name}-*")
            wait_for("some steps", lambda: step(run) >= 5 or process.poll() is not None, run)  # noqa: B023
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 75, errors
        project.submit("--local", *named, f"resources.tasks_per_node={then or 2}")
        (found[name],) = project.path.glob(f"runs/{name}-*")
        assert status(found[name])["state"] == "finished", describe(found[name])
        assert logged_steps(found[name]) == list(range(STEPS))
    assert difference(found["whole"], found["same"]) == 0.0
    assert difference(found["whole"], found["fewer"]) < tolerance


def test_a_run_with_its_shards_on_the_host_is_stopped_and_ends_as_one_without(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    two = ["resources.nodes=1", "resources.tasks_per_node=2"]
    project.submit("--local", "name=plain", "parallel=zero3", *two)
    offloaded = ["name=offloaded", "parallel={data: zero3, offload: true}", *two]
    process = project.start("submit", "toy.yaml", "--local", *offloaded)
    wait_for("a run directory", lambda: list(project.path.glob("runs/offloaded-*")))
    (run,) = project.path.glob("runs/offloaded-*")
    wait_for("some steps", lambda: step(run) >= 5 or process.poll() is not None, run)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    project.submit("--local", *offloaded)
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["user", "finished"]
    (plain,) = project.path.glob("runs/plain-*")
    assert difference(run, plain) == 0.0
    refused = project.jobkit("submit", "toy.yaml", "--local", "parallel={offload: true}", *two, expect=2).stderr
    assert "parallel: offload is for zero2, zero3, hsdp, without tensor and pipeline; found ddp" in refused


def test_a_run_of_one_rank_with_its_shards_on_the_host_is_killed_and_ends_as_one_without(tmp_path: Path) -> None:
    project = Project(tmp_path)
    killed = "        if ctx.attempt == 1 and step == 20 and 'plain' not in str(ctx.run_dir): os.kill(os.getpid(), 9)\n"
    pause = "        time.sleep"
    (project.path / "mytask.py").write_text("import os\n" + TASK.replace(pause, killed + pause))
    one = ["resources.nodes=1", "resources.tasks_per_node=1"]
    for name, parallel in (("plain", "zero3"), ("offloaded", "{data: zero3, offload: true}")):
        project.submit("--local", f"name={name}", f"parallel={parallel}", *one)
    (plain,), (run,) = project.path.glob("runs/plain-*"), project.path.glob("runs/offloaded-*")
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["killed", "finished"]
    assert difference(run, plain) == 0.0
