"""From the command to the first step: jobkit beside torchrun with the same function, in turn, on this machine.

python tools/bench/start.py --repeats 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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

dist.init_process_group("gloo")
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


def seconds(command: list[str], project: Path, number: int) -> float:
    """From the start of a command to the first step of what it runs, in seconds."""
    told = project / f"told_{number}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FIRST_STEP": str(told)}
    started = time.time()
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    return float(told.read_text()) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    numbers = iter(range(1000))
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        project = Path(folder)
        for name, text in (("steps.py", STEPS), ("mytask.py", TASK), ("plain.py", PLAIN), ("bench.yaml", YAML)):
            (project / name).write_text(text)
        for ranks, target in ((1, 1.0), (4, 0.4)):
            ours = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--local", "--fresh"]
            ours += [f"resources.tasks_per_node={ranks}"]
            plain = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            plain += [f"--master-port={29700 + ranks}", "plain.py"]
            times: dict[str, list[float]] = {"jobkit": [], "torchrun": []}
            seconds(plain, project, next(numbers))  # reads torch's files from the disk
            for _ in range(repeats):
                times["jobkit"].append(seconds(ours, project, next(numbers)))
                times["torchrun"].append(seconds(plain, project, next(numbers)))
            for name, measured in times.items():
                spread = f"{min(measured):.2f} to {max(measured):.2f}"
                print(f"{ranks} ranks, {name:9} median {statistics.median(measured):.2f} s, {spread}", flush=True)
            ratio = statistics.median(times["jobkit"]) / statistics.median(times["torchrun"])
            print(json.dumps({"ranks": ranks, "jobkit_over_torchrun": round(ratio, 3), "target": target}), flush=True)


if __name__ == "__main__":
    main()
