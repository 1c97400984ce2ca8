"""What the training side does in a run: devices that it names, an averaged model that it looks at and trains on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, describe, status

from jobkit.supervisor.parents import WARM_PARENT

TASK = """
import torch
from torch import nn

from jobkit.train.optim import fused_ema_adam


def train(ctx):
    net = nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 1))
    model = ctx.parallelize(net)
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-2)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 8)), global_batch_size=16)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    found = []

    @torch.no_grad()
    def look():
        found.append(model(torch.ones(1, 8)).item())

    for step in ctx.steps(8):
        if step in (4, 6):
            with ctx.averaged(optimizer):
                look()
            look()
        (x,) = next(loader)
        ctx.backward(model, x, lambda output, x: (output - x.sum(1, keepdim=True)).square().mean(), x)
        ctx.update(optimizer)
    look()
    return found
"""


def result_of(project: Project, override: str) -> list[float]:
    project.submit("--local", "resources.nodes=1", override)
    result: list[float] = status(project.run_of("resources.nodes=1", override))["result"]
    return result


def test_a_model_whose_parts_stay_gathered_is_looked_at_and_trained_with_the_right_weights(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    ddp, zero2 = (result_of(project, f"parallel={name}") for name in ("ddp", "zero2"))
    assert abs(ddp[0] - ddp[1]) > 1e-3, "the averages are not the parameters"
    assert zero2 == pytest.approx(ddp, abs=1e-4)


def test_each_rank_of_a_run_says_once_what_it_computes_on(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit("--local", "params.steps=2", "resources.nodes=1")
    (run,) = project.runs
    for rank, line in ((0, "2 rank(s), gloo, cpu"), (1, "rank 1: cpu")):
        lines = (run / "logs" / "1" / f"rank_{rank}.out").read_text().splitlines()
        assert lines.count(line) == 1, describe(run)


LIMITED = ["bash", "-c", 'ulimit -Sn 40 && exec "$0" "$@"', sys.executable, "-m", "jobkit", "submit", "toy.yaml"]


def test_more_ranks_find_each_other_than_the_soft_limit_of_open_files_has_room_for(tmp_path: Path) -> None:
    """Each needs three for every other one, and twenty."""
    project = Project(tmp_path)
    command = [*LIMITED, "--local", "params.steps=2", "resources.tasks_per_node=6"]
    own = {key: value for key, value in project.env.items() if key != WARM_PARENT}  # which has a limit of its own
    done = subprocess.run(command, cwd=project.path, env=own, capture_output=True, text=True, timeout=300)
    (run,) = project.runs
    assert done.returncode == 0, describe(run)
