"""On a real Slurm: a node that computes wrongly is found by repeating a step; and a run there is started from."""

from __future__ import annotations

from pathlib import Path

from harness.project import Project, describe, events, is_over, status, wait_for
from slurm_cluster import Cluster

TASK = """
import torch
from torch import nn


def train(ctx):
    model = ctx.parallelize(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(ctx.params.steps):
        (x,) = next(loader)
        if step == 5 and ctx.attempt == 1 and ctx.rank == 1:
            x = x * torch.inf  # as of a node that computes wrongly
        loss = ctx.backward(model, x, lambda y, x: (y - x).square().mean(), x)
        ctx.update(optimizer)
    return loss
"""

YAML = """\
name: d
task: mytask:train
params: {steps: 8}
on_nan: rerun
resources: {nodes: 2, spares: 1, time: "0:05:00"}
checkpoint: {every: 2, memory: false}
clusters: {slurm: {partition: low}}
"""


def test_the_node_of_a_step_with_two_results_is_excluded_and_the_run_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    (project.path / "mytask.py").write_text(TASK)
    (project.path / "toy.yaml").write_text(YAML)
    project.submit("--cluster", "slurm")
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run)
    found = status(run)
    first, second, last = found["attempts"]
    faulty = first["nodes"][1]
    assert (first["failure"]["not_finite"], first["failure"]["step"], first["failure"]["node"]) == (True, 5, faulty)
    assert second["failure"]["faulty_node"] == faulty and last["cause"] == "finished", describe(run)
    assert found["excluded_nodes"] == [faulty] and faulty not in last["nodes"]
    assert [(e["step"], e["node"]) for e in events(run) if e["event"] == "hardware_fault"] == [(5, faulty)]

    project.submit(
        "--cluster", "slurm", "--from", run.name, "params.steps=12", "resources.nodes=1", "resources.spares=0"
    )
    (fork,) = (one for one in project.runs if one != run)
    wait_for("the end", lambda: is_over(fork), fork)
    found = status(fork)
    assert (found["state"], found["step"], found["start_from"]["step"]) == ("finished", 12, 8), describe(fork)
