"""A loss that is not a number: the run ends on the spot, or does what `on_nan` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, status

TASK = """
import torch
from torch import nn


def train(ctx):
    p = ctx.params
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    x[p.bad] = torch.nan
    loader = ctx.loader(torch.utils.data.TensorDataset(x, torch.arange(32)), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(8):
        x, ids = next(loader)
        if p.bad in ids.tolist():
            print("bad in step", step, flush=True)
        if p.by_hand:
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = ctx.backward(model, x, lambda y, x: (y - x).square().mean(), x)
            ctx.update(optimizer)
        ctx.log({"train/loss": loss, "val/loss": float("nan")})
    state = getattr(model, "module", model).state_dict()
    return {"finite": all(bool(one.isfinite().all()) for one in state.values())}
"""

YAML = "name: d\ntask: mytask:train\nparams: {bad: 5, by_hand: false}\nresources: {tasks_per_node: 2}\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "toy.yaml").write_text(YAML)
    return made


def step_of_bad(run: Path) -> tuple[int, int]:
    """(step, rank) in which the bad sample came first."""
    found = []
    for file in (run / "logs").glob("*/rank_*.out"):
        for line in file.read_text().splitlines():
            if line.startswith("bad in step "):
                found.append((int(line.split()[-1]), int(file.stem.split("_")[1])))
    return min(found)


@pytest.mark.parametrize("by_hand", ["false", "true"])
def test_the_run_ends_at_once_and_names_step_rank_and_samples(project: Project, by_hand: str) -> None:
    project.submit("--local", f"params.by_hand={by_hand}", expect=1)
    (run,) = project.runs
    step, rank = step_of_bad(run)
    found = status(run)
    assert (found["state"], len(found["attempts"])) == ("failed", 1), "not tried again"
    failure = found["attempts"][0]["failure"]
    assert (failure["step"], failure["rank"]) == (step, rank)
    assert 5 in failure["samples"] and len(failure["samples"]) == 4
    said = jobkit(project, "status", "d").stdout
    assert f"error: rank {rank}: NotFinite: the loss of step {step} is nan: it is the data's or the model's" in said
    assert f"failed at: rank {rank}, step {step}" in said and "samples of that rank's batch: " in said

    # What the message says: without the sample the run goes on from its start.
    if by_hand == "false":
        project.submit("--local", "on_nan=off")
        assert status(run)["result"] == {"finite": False}
