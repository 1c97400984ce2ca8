"""Measure training under jobkit: a step, an empty boundary, a start, and a restart after a death.

    .venv/bin/python tools/bench/training.py [step boundary start restart] [--repeats 5] [--gpu] [--quick]

step      a step of a small model under jobkit     / the same loop by hand, in turns in the same processes
boundary  microseconds between two empty steps
start     4 ranks until the first step             / the same script under torchrun, in turns
restart   seconds from a rank's death to the first new step, on one node

With --gpu the step and the restart are those of one rank on a GPU, the step with a larger model.
"""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from harness.runs import Project, wait_until  # noqa: E402
from table import QUICK, options, show  # noqa: E402

TASK = """\
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn

def network(width=512):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256))

def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

def by_hand(model, optimizer, x, y, steps):
    began = now(x.device)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return now(x.device) - began

def steps(ctx):
    '''Blocks of steps by hand and under jobkit, in turns.'''
    width = 512 if ctx.device.type == "cpu" else 4096
    model = ctx.parallelize(network(width))
    optimizer = ctx.optimizer(model, torch.optim.AdamW)
    ctx.track(model=model, optimizer=optimizer)
    other = network(width).to(ctx.device)
    if ctx.world_size > 1:
        other = nn.parallel.DistributedDataParallel(other, gradient_as_bucket_view=True)
    others = torch.optim.AdamW(other.parameters())
    x, y = torch.rand(64, 256, device=ctx.device), torch.rand(64, 256, device=ctx.device)
    block, ratios, began = 40 if ctx.device.type == "cpu" else 200, [], None
    for step in ctx.steps(block * (ctx.params.repeats + 1)):
        if step % block == 0:
            if began is not None:
                mine = now(ctx.device) - began
                ratios.append(mine / by_hand(other, others, x, y, block))
            began = now(ctx.device)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
    return {"ratios": ratios[1:]}

def boundary(ctx):
    model = torch.nn.Linear(1, 1)
    ctx.track(model=model)
    times = []
    began = time.perf_counter()
    block = ctx.params.block
    for step in ctx.steps(10 * block):
        if (step + 1) % block == 0:
            times.append((time.perf_counter() - began) / block * 1e6)
            began = time.perf_counter()
    return {"ratios": times}

def first_step(ctx):
    ranks = ctx.run_dir / "outputs" / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    (ranks / str(ctx.rank)).write_text(f"{ctx.attempt} {os.getpid()}")
    model = ctx.parallelize(network())
    optimizer = ctx.optimizer(model, torch.optim.AdamW)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(100_000):
        x = torch.rand(8, 256, device=ctx.device)
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ctx.rank == 0:
            mark(ctx.run_dir / "outputs", step, ctx.attempt)
        if ctx.params.get("short"):
            break
        time.sleep(0.02)

def mark(folder, step, attempt):
    file = folder / f"first-{attempt}"
    if not file.exists():
        folder.mkdir(exist_ok=True)
        file.write_text(f"{time.time()} {step}")

if __name__ == "__main__":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.mse_loss(model(torch.rand(8, 256)), torch.rand(8, 256)).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(time.time()))
    dist.barrier()
    os._exit(0)
"""


def project(function: str, ranks: int, gpus: int = 0, **params: Any) -> Project:
    text = ", ".join(f"{name}: {json.dumps(value)}" for name, value in params.items())
    resources = f"{{tasks_per_node: {ranks}, gpus_per_task: {gpus}}}"
    yaml = f"name: bench\ntask: bench_task:{function}\nparams: {{{text}}}\nresources: {resources}\n"
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Project(folder / "project", yaml=yaml, plain=False)
    made.write("bench_task.py", TASK)
    return made


def result(made: Project) -> dict[str, list[float]]:
    """Run a project's task as a job, and return its result."""
    made.jobkit("submit", str(made.yaml), "--local")
    (run,) = (made.folder / "runs").glob("bench-*")
    return made.launch(run).status.result  # type: ignore[return-value]


def bench_step(repeats: int, gpus: int) -> None:
    for ranks, bound in ((1, 1.02),) if gpus else ((2, 1.03),) if QUICK else ((1, 1.02), (2, 1.03)):
        ratios = result(project("steps", ranks, gpus, repeats=4 * repeats))["ratios"]
        show(f"step, {ranks} rank(s) / by hand", ratios, bound, "times")


def bench_boundary(repeats: int, gpus: int) -> None:
    show("an empty boundary", result(project("boundary", 1, block=200 if QUICK else 20_000))["ratios"], 10, "us")


def bench_start(repeats: int, gpus: int) -> None:
    ratios, ranks = [], 2 if QUICK else 4
    for _ in range(repeats):
        made = project("first_step", ranks, short=True)
        began = time.time()
        made.jobkit("submit", str(made.yaml), "--local")
        (file,) = (made.folder / "runs").glob("bench-*/outputs/first-1")
        mine = float(file.read_text().split()[0]) - began
        mark, began = made.folder / "mark", time.time()
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "bench_task.py", str(mark)]
        subprocess.run(words, cwd=made.folder, env=made.environment, check=True, capture_output=True)
        ratios.append(mine / (float(mark.read_text()) - began))
    show(f"start, {ranks} ranks / torchrun", ratios, 0.4, "times")


def moment_in(file: Path) -> float:
    """Return the time that a rank writes into a file, once it is there."""
    wait_until(lambda: file.exists() and file.read_text(), file.name)
    return float(file.read_text().split()[0])


def bench_restart(repeats: int, gpus: int) -> None:
    ranks = 1 if gpus else 2
    made = project("first_step", ranks, gpus)
    launch = made.submit("--local", "--detach")
    seconds = []
    for number in range(1, repeats + 1):
        first = launch.run.outputs / f"first-{number}"
        wait_until(first.exists, f"attempt {number}")
        time.sleep(3)  # a snapshot in memory
        began = time.time()
        launch.kill_rank(ranks - 1)
        following = launch.run.outputs / f"first-{number + 1}"
        seconds.append(moment_in(following) - began)
    show("restart on one node", seconds, 0.5)
    made.jobkit("cancel", "-y", str(launch.run.path))
    launch.wait_until_over()


BENCHES = {"step": bench_step, "boundary": bench_boundary, "start": bench_start, "restart": bench_restart}


def main() -> None:
    parser = options(__doc__, 5, BENCHES)
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    for row in arguments.parts or (["step", "restart"] if arguments.gpu else BENCHES):
        BENCHES[row](arguments.repeats, int(arguments.gpu))


if __name__ == "__main__":
    main()
