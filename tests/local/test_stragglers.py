"""A rank that holds the others up is named, by its own time in a step; the ranks that wait for it are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Launch, Project

YAML = """\
name: slow
task: slow_task:train
params: {kind: steps, slow_load: -1, slow_forward: -1}
resources: {tasks_per_node: 3}
"""

TASK = '''\
import time

import torch


class Numbers(torch.utils.data.Dataset):
    """Loads slowly on a rank."""

    def __init__(self, ctx):
        self.seconds = 0.3 if ctx.params.slow_load == ctx.rank else 0.0

    def __len__(self):
        return 6000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(4)


class Net(torch.nn.Linear):
    """Computes slowly on a rank."""

    def __init__(self, ctx):
        super().__init__(4, 4)
        self.seconds = 0.4 if ctx.params.slow_forward == ctx.rank else 0.1

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def train(ctx):
    data = Numbers(ctx)
    model = ctx.parallelize(Net(ctx))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if ctx.params.kind == "steps":
        loader = ctx.loader(data, global_batch_size=ctx.world_size)
        ctx.track(model=model, optimizer=optimizer, loader=loader)
        for _ in ctx.steps(10**6):
            step(next(loader))
    else:
        loader = torch.utils.data.DataLoader(data, batch_size=1)
        for _ in ctx.epochs(10**3, model=model, optimizer=optimizer):
            for batch in ctx.batches(loader):
                step(batch)
'''


def described(launch: Launch) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(launch.project.jobkit("status", launch.run.name, "--json").stdout)
    return value


CASES = {
    "load, in ctx.batches": ({"slow_load": 2, "kind": "batches"}, 2),
    "forward, in ctx.steps": ({"slow_forward": 0}, 0),
}


@pytest.mark.parametrize(("params", "slow"), CASES.values(), ids=CASES)
def test_the_slow_rank_is_named(project: Project, params: dict[str, Any], slow: int) -> None:
    made = Project(project.folder, yaml=YAML, plain=False)
    (made.folder / "slow_task.py").write_text(TASK)
    launch = made.submit("--local", "--detach", **params)
    launch.wait_until(lambda launch: getattr(launch.run.progress(), "rank_seconds", None), "readings")
    status, text = described(launch), made.jobkit("status", launch.run.name).stdout
    assert [named["rank"] for named in status["slow_ranks"]] == [slow], status["progress"]
    assert f"slow: rank {slow} on " in text
    assert all(seconds >= 0.1 for seconds in status["progress"]["rank_seconds"])
    made.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert described(launch)["slow_ranks"] == []


def test_doctor_measures_the_network_of_several_nodes(tmp_path: Path) -> None:
    made = Project(tmp_path, plain=False)
    done = made.jobkit("doctor", "--local", "--nodes", "3")
    assert done.stdout.count("GB/s a rank") == 3
    assert done.stdout.count("to a neighbour") == 3
