"""A run on a private Slurm whose ranks and nodes are killed: its files, its commands, and when it trains again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TASK = """\
import os
import time

import torch
from torch import nn


def train(ctx):
    torch.set_num_threads(1)
    model = ctx.parallelize(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    ctx.track(model=model, optimizer=optimizer)
    (ctx.run_dir / f"pid_{ctx.attempt}_{ctx.rank}").write_text(str(os.getpid()))
    for step in ctx.steps(10**7):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told = ctx.run_dir / f"step_{ctx.attempt}"
        if ctx.rank == 0 and not told.exists():
            told.with_suffix(".tmp").write_text(str(time.time()))
            told.with_suffix(".tmp").rename(told)
        time.sleep(ctx.params.pause)
"""

YAML = """\
name: bench
task: mytask:train
params: {{pause: {pause}}}
resources: {{nodes: {nodes}, tasks_per_node: {tasks}, time: "2:00:00"}}
retry: {{crash: unlimited, exclude_after: 99}}
clusters: {{slurm: {{partition: low}}}}
"""


def write_project(project: Path, *, nodes: int, tasks: int, pause: float) -> None:
    """The folder of a user's, with the task and a YAML; `pause` is what a step sleeps, in seconds."""
    project.mkdir()
    (project / "mytask.py").write_text(TASK, encoding="utf-8")
    (project / "bench.yaml").write_text(YAML.format(nodes=nodes, tasks=tasks, pause=pause), encoding="utf-8")


class Run:
    """A run that trains, and is to lose something again and again; `patience` is for each of its first steps."""

    def __init__(self, project: Path, environment: Mapping[str, str], *overrides: str, patience: float = 600.0) -> None:
        self.project, self.environment, self.patience = project, environment, patience
        before, began = set(project.glob("runs/*")), time.time()
        self.jobkit("submit", "bench.yaml", "--cluster", "slurm", "--fresh", *overrides)
        (self.path,) = set(project.glob("runs/bench-*")) - before
        self.attempt = 1
        self.seconds_of_start = self.first_step(1) - began
        """From the submission until the first step."""

    def jobkit(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "jobkit", *arguments]
        done = subprocess.run(command, cwd=self.project, env=self.environment, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        return json.loads(self.jobkit("status", self.path.name, "--json"))  # type: ignore[no-any-return]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of a kind that the journal has."""
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [one for one in map(json.loads, lines) if one["event"] == kind]

    def first_step(self, attempt: int) -> float:
        """When an attempt had done its first step, waited for."""
        return float(read(self.path / f"step_{attempt}", self.patience))

    def kill_rank(self, rank: int) -> None:
        os.kill(int(read(self.path / f"pid_{self.attempt}_{rank}", self.patience)), signal.SIGKILL)

    def seconds_after(self, death: Callable[[], object], *, after: float = 2.5) -> float:
        """From a death until the first new step; it comes after so many seconds, in which a snapshot is taken."""
        time.sleep(after)
        started = time.time()
        death()
        self.attempt += 1
        return self.first_step(self.attempt) - started


def read(file: Path, seconds: float = 600.0) -> str:
    """The text of a file, once it is there."""
    until = time.monotonic() + seconds
    while not (file.exists() and (text := file.read_text(encoding="utf-8"))):
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not come within {seconds:g} s")
        time.sleep(0.005)
    return text
