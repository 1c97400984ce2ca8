"""Whole runs with a rank that holds the others up: it is named while it does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from harness.project import Project, describe, events, logged_steps, names, status, wait_for

from jobkit.worker.stragglers import EXCHANGES

TASK = '''\
"""Steps that wait on purpose: every rank 0.1 s, and the one whose number is in slow_load or slow_forward longer."""
import time
from pathlib import Path

import torch


def longer(ctx, where):
    file = ctx.run_dir / f"slow_{where}"
    return 0.3 if file.exists() and file.read_text() == str(ctx.rank) else 0.0


class Numbers(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.ctx = ctx

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(longer(self.ctx, "load"))
        return torch.randn(4)


class Net(torch.nn.Linear):
    def __init__(self, ctx):
        super().__init__(4, 4)
        self.ctx = ctx

    def forward(self, x):
        time.sleep(0.1 + longer(self.ctx, "forward"))
        return super().forward(x)


def train(ctx):
    model = ctx.parallelize(Net(ctx))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(Numbers(ctx), global_batch_size=ctx.world_size)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(ctx.params.steps):
        model(next(loader)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
'''


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    return project


def test_a_slow_rank_is_named_until_it_has_recovered(project: Project) -> None:
    place = ("--local", "resources.nodes=1", "resources.tasks_per_node=4")
    project.submit(*place, "--detach", "params.steps=100000")
    (run,) = project.runs
    for where, rank in (("load", 2), ("forward", 0)):
        seen = len(events(run))
        (run / f"slow_{where}").write_text(str(rank))
        wait_for("a straggler", lambda: "straggler" in names(run)[seen:], run)  # noqa: B023
        (told,) = [event for event in events(run)[seen:] if event["event"] == "straggler"]
        assert (told["rank"], told["host"]) == (rank, socket.gethostname()), describe(run)
        assert told["seconds"] > 1.5 * told["median"] >= 0.1
        named = lambda: [one["rank"] for one in status(run)["stragglers"]]  # noqa: E731
        wait_for("its name in status.json, which follows the journal", lambda: named() == [rank], run)  # noqa: B023
        assert f"slow: rank {rank} on" in project.jobkit("status", run.name).stdout
        (run / f"slow_{where}").unlink()
        wait_for("its recovery", lambda: "straggler_over" in names(run)[seen:], run)  # noqa: B023
        wait_for("no name in status.json", lambda: named() == [], run)  # noqa: B023
        assert "slow:" not in project.jobkit("status", run.name).stdout
    assert "rank 2" in project.jobkit("logs", run.name).stdout
    project.jobkit("cancel", run.name)
    for rank in range(4):
        steps = logged_steps(run, f"perf/rank_seconds/{rank}")
        assert len(steps) >= 2 * EXCHANGES and len(set(steps)) == len(steps)


def test_ranks_that_take_equally_long_are_not_named(project: Project) -> None:
    project.submit("--local", "resources.nodes=1", "resources.tasks_per_node=4", "params.steps=60")
    (run,) = project.runs
    assert len(logged_steps(run, "perf/rank_seconds/3")) >= EXCHANGES
    assert "straggler" not in names(run), describe(run)


def test_a_slow_loader_is_named_where_forward_passes_wait_for_each_other(project: Project) -> None:
    place = ("--local", "resources.nodes=1", "resources.tasks_per_node=2", "parallel=zero3")
    project.submit(*place, "--detach", "params.steps=100000")
    (run,) = project.runs
    (run / "slow_load").write_text("1")
    wait_for("a straggler", lambda: "straggler" in names(run), run)
    assert [event["rank"] for event in events(run) if event["event"] == "straggler"] == [1]
    project.jobkit("cancel", run.name)
    assert status(run)["stragglers"] == []


def test_a_rank_alone_compares_itself_with_nobody(project: Project) -> None:
    project.submit("--local", "resources.nodes=1", "resources.tasks_per_node=1", "params.steps=15")
    (run,) = project.runs
    assert logged_steps(run, "perf/rank_seconds/0") == [] and logged_steps(run, "perf/step_seconds") != []
