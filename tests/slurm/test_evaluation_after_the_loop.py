"""A job that Slurm preempts in what comes after the last step: what it has evaluated is kept."""

from __future__ import annotations

from pathlib import Path

from harness.project import Project, causes, describe, events, is_over, status, wait_for
from slurm_cluster import Cluster

DRAW = """
import time

import torch
from torch import nn

SAMPLES = 40


def train(ctx):
    model = ctx.parallelize(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(3):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def draw(numbers, ids):
        for number in numbers.tolist():
            with (ctx.run_dir / f"drawn_{ctx.rank}").open("a") as file:
                file.write(f"{number}\\n")
            (ctx.run_dir / f"draws_{ctx.attempt}").touch()
        time.sleep(1.0 if ctx.attempt == 1 else 0.0)
        return numbers * 2.0

    found = ctx.map(draw, torch.arange(SAMPLES), batch_size=1)
    return {"sum": float(found.sum())} if ctx.is_main else None
"""


def test_a_preemption_after_the_last_step_repeats_no_sample_and_no_step(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    (project.path / "drawing.py").write_text(DRAW)
    project.submit("--cluster", "slurm", "task=drawing:train", "resources.nodes=2", "resources.tasks_per_node=1")
    (run,) = project.runs
    wait_for("samples", lambda: (run / "draws_1").exists(), run)
    slurm.preempt(status(run)["job_id"])
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "finished"], describe(run)
    (kept,) = [event for event in events(run) if event["event"] == "evaluation_interrupted"]
    assert kept["kept"] and 0 < kept["known"] < 40
    drawn = [int(line) for rank in range(2) for line in (run / f"drawn_{rank}").read_text().splitlines()]
    assert sorted(drawn) == list(range(40)), "each once"
    assert status(run)["result"]["sum"] == sum(range(40)) * 2.0
    assert sum(event["event"] == "evaluation_resumed" for event in events(run)) == 1
