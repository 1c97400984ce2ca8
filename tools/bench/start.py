"""From the command to the first step: jobkit beside torchrun with the same function, in turn, on this machine.

With --slurm, 8 nodes x 8 tasks of a private Slurm: jobkit beside srun with a process a rank, once each by default.
    python tools/bench/start.py --repeats 5
    python tools/bench/start.py --slurm
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, absolute, ratios, tell
from slurm_cluster import Cluster

STEPS = """\
import os
import time
from pathlib import Path

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def step(model, optimizer):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tell():
    file = Path(os.environ["FIRST_STEP"])
    file.with_suffix(".tmp").write_text(str(time.time()))
    file.with_suffix(".tmp").rename(file)
"""

TASK = """\
import torch

import steps


def train(ctx):
    model = ctx.parallelize(steps.model())
    optimizer = torch.optim.AdamW(model.parameters())
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(3):
        steps.step(model, optimizer)
        if step == 0 and ctx.rank == 0:
            steps.tell()
"""

PLAIN = """\
import os

import torch
import torch.distributed as dist

import steps

names = ("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")
rank, world = (int(os.environ.get(one) or os.environ[other]) for one, other in names)
method = "env://" if "RANK" in os.environ else f"file://{os.environ['FIRST_STEP']}_store"
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
model = torch.nn.parallel.DistributedDataParallel(steps.model())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    steps.step(model, optimizer)
    if step == 0 and dist.get_rank() == 0:
        steps.tell()
dist.barrier()
os._exit(0)  # torch aborts now and then in its own teardown
"""

YAML = """\
name: bench
task: mytask:train
"""

FILES = (("steps.py", STEPS), ("mytask.py", TASK), ("plain.py", PLAIN), ("bench.yaml", YAML))

WAIT_SECONDS = 900.0
"""For what a command has queued."""


def seconds(command: list[str], project: Path, number: int, cluster: Mapping[str, str] | None = None) -> float:
    """From the start of a command to the first step of what it runs, in seconds."""
    told = project / f"told_{number}"
    environment = {**os.environ, **(cluster or {}), "OMP_NUM_THREADS": "1", "FIRST_STEP": str(told)}
    started = time.time()
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    while not told.exists():
        if time.time() - started > WAIT_SECONDS:
            raise SystemExit(f"{command}: no step within {WAIT_SECONDS:g} s")
        time.sleep(0.05)
    return float(told.read_text(encoding="utf-8")) - started


def report(ranks: int, times: Mapping[str, list[float]], target: float) -> None:
    (_, other), (our_times, other_times) = times, times.values()
    for name, measured in times.items():
        spread = f"{min(measured):.2f} to {max(measured):.2f}"
        print(f"{ranks} ranks, {name:9} median {statistics.median(measured):.2f} s, {spread}", flush=True)
    what = f"from the command to the first step, {ranks} rank{'s' * (ranks > 1)}"
    values, note = ratios(our_times, other_times), absolute(our_times, other_times)
    tell(Row(what, f"{other}, the same function", values, target, note=note))


def beside_torchrun(project: Path, repeats: int) -> None:
    numbers = iter(range(1000))
    for ranks in (1, 4):
        ours = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--local", "--fresh"]
        ours += [f"resources.tasks_per_node={ranks}"]
        plain = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        plain += [f"--master-port={29700 + ranks}", "plain.py"]
        times: dict[str, list[float]] = {"jobkit": [], "torchrun": []}
        seconds(plain, project, next(numbers))  # reads torch's files from the disk
        for _ in range(repeats):
            times["jobkit"].append(seconds(ours, project, next(numbers)))
            times["torchrun"].append(seconds(plain, project, next(numbers)))
        report(ranks, times, 1.15)


def beside_srun(project: Path, repeats: int) -> None:
    numbers = iter(range(1000))
    place = ["resources.nodes=8", "resources.tasks_per_node=8"]
    ours = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--cluster", "slurm", "--fresh", *place]
    plain = ["srun", "--nodes=8", "--ntasks-per-node=8", sys.executable, "plain.py"]
    times: dict[str, list[float]] = {"jobkit": [], "srun": []}
    with Cluster(project / "slurm", nodes=8, cpus=8) as cluster:
        for _ in range(repeats):
            times["jobkit"].append(seconds(ours, project, next(numbers), cluster.env))
            subprocess.run(["srun", "--nodes=8", "true"], env={**os.environ, **cluster.env}, check=True)  # it has ended
            times["srun"].append(seconds(plain, project, next(numbers), cluster.env))
    report(64, times, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--slurm", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        project = Path(folder)
        for name, text in FILES:
            (project / name).write_text(text, encoding="utf-8")
        if options.slurm:
            beside_srun(project, options.repeats or 1)
        else:
            beside_torchrun(project, options.repeats or 5)


if __name__ == "__main__":
    main()
