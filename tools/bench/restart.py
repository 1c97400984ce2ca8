"""What a death costs: from the kill of a rank, or of a node, to the first new step, part by part.

In place, beside a requeue of the same job and a plain srun of the same function from nothing, 2 nodes x 2 ranks.
Starts a private Slurm for itself, with the times that Slurm has by default:
    python tools/bench/restart.py --repeats 5
    python tools/bench/restart.py --repeats 5 --cred-expire 5
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_cluster import Cluster

TASK = """\
import os
import time
from pathlib import Path

import torch
from torch import nn


def train(ctx):
    model = ctx.parallelize(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    ctx.track(model=model, optimizer=optimizer)
    (ctx.run_dir / f"pid_{ctx.attempt}_{ctx.rank}").write_text(str(os.getpid()))
    for step in ctx.steps(100000):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told = ctx.run_dir / f"step_{ctx.attempt}"
        if ctx.rank == 0 and not told.exists():
            told.with_suffix(".tmp").write_text(str(time.time()))
            told.with_suffix(".tmp").rename(told)
        time.sleep(0.02)
"""

PLAIN = """\
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
if rank == 0:
    Path(sys.argv[2]).write_text(str(time.time()))
dist.barrier()
os._exit(0)  # torch aborts now and then in its own teardown
"""

YAML = """\
name: bench
task: mytask:train
resources: {nodes: 2, tasks_per_node: 2, time: "1:00:00"}
retry: {crash: unlimited, exclude_after: 99}
clusters: {slurm: {partition: low}}
"""

PARTS = ("notice", "kill", "start", "load", "step")


class Run:
    """A run that trains, and is to lose something again and again."""

    def __init__(self, project: Path, environment: dict[str, str], *overrides: str) -> None:
        self.project, self.environment = project, environment
        before = set(project.glob("runs/*"))
        self.jobkit("submit", "bench.yaml", "--cluster", "slurm", "--fresh", *overrides)
        (self.path,) = set(project.glob("runs/bench-*")) - before
        self.attempt = 1
        self.first_step(1)

    def jobkit(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "jobkit", *arguments]
        done = subprocess.run(command, cwd=self.project, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        return done.stdout

    def first_step(self, attempt: int) -> float:
        """When an attempt had done its first step, waited for."""
        return float(read(self.path / f"step_{attempt}"))

    def seconds_after(self, death: Callable[[], object]) -> float:
        """From a death until the first new step."""
        time.sleep(2.5)  # it trains, and a snapshot is there
        started = time.time()
        death()
        self.attempt += 1
        return self.first_step(self.attempt) - started

    def kill_rank(self, rank: int) -> None:
        os.kill(int(read(self.path / f"pid_{self.attempt}_{rank}")), signal.SIGKILL)

    def parts(self) -> list[dict[str, float]]:
        """What each restart took, part by part."""
        time.sleep(1.0)  # the journal gets the first step's event within that
        attempts = json.loads(self.jobkit("status", self.path.name, "--json"))["attempts"]
        return [one["restart"] for one in attempts if one["restart"]]


def read(file: Path, seconds: float = 600.0) -> str:
    """The text of a file, once it is there."""
    until = time.monotonic() + seconds
    while not (file.exists() and (text := file.read_text())):
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not come within {seconds:g} s")
        time.sleep(0.005)
    return text


def plain(project: Path, environment: dict[str, str], repeat: int) -> float:
    """A plain srun of the same steps, from nothing to the first one."""
    started = time.time()
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "plain.py"]
    files = [str(project / f"rendezvous_{repeat}"), str(project / f"plain_{repeat}")]
    subprocess.run([*command, *files], cwd=project, env=environment, check=True, capture_output=True)
    return float(read(project / f"plain_{repeat}")) - started


def report(name: str, seconds: list[float], parts: list[dict[str, Any]]) -> None:
    words = [
        f"{part} {statistics.median(known):.2f}"
        for part in PARTS
        if (known := [one[part] for one in parts if one.get(part) is not None])
    ]
    spread = f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"
    print(f"{name:28} {spread}   {', '.join(words)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cred-expire", type=int, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        project = Path(folder) / "project"
        project.mkdir()
        for name, text in (("mytask.py", TASK), ("plain.py", PLAIN), ("bench.yaml", YAML)):
            (project / name).write_text(text)
        with Cluster(Path(folder) / "slurm", nodes=3, cred_expire=options.cred_expire) as cluster:
            environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}
            run = Run(project, environment, "resources.spares=1")
            in_place = [run.seconds_after(lambda: run.kill_rank(3)) for _ in range(options.repeats)]
            parts = run.parts()
            report("a rank, in place", in_place, parts)
            lost = run.seconds_after(lambda: cluster.kill_node("node2"))
            report("a node, with a spare", [lost], run.parts()[options.repeats :])
            restarts = cluster.job(json.loads(run.jobkit("status", run.path.name, "--json"))["job_id"])["Restarts"]
            run.jobkit("cancel", run.path.name)
            cluster.restart_node("node2")
            bare = [plain(project, environment, repeat) for repeat in range(options.repeats)]
            report("plain srun, from nothing", bare, [])
            run = Run(project, environment, "retry.in_place=false")
            requeued = run.seconds_after(lambda: run.kill_rank(3))
            report("a rank, requeued", [requeued], run.parts())
            run.jobkit("cancel", run.path.name)
    median = statistics.median(in_place)
    print(json.dumps({"in_place_seconds": round(median, 2), "target": 1.0, "restarts_of_the_job": int(restarts)}))
    print(json.dumps({"spare_seconds": round(lost, 2), "target": 3.0}))
    print(json.dumps({"in_place_over_plain": round(median / statistics.median(bare), 3)}))
    print(json.dumps({"requeued_over_in_place": round(requeued / median, 1), "cred_expire": options.cred_expire}))


if __name__ == "__main__":
    main()
