"""64 ranks against 16, per rank: start, agree on a stop, write a checkpoint, restart in place.

All on one machine, on nodes of a private Slurm: 8 nodes x 8 tasks, then 2 x 8. What a rank costs should not grow with
their number. 64 ranks take about 10 GiB of memory; with less than --least-memory left it does not begin:
    python tools/bench/many_ranks.py
    python tools/bench/many_ranks.py --many 2x2 --few 1x2     # in small
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, missing, ratios, tell
from slurm_cluster import Cluster, wait_until

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
        time.sleep(0.05)
"""

YAML = """\
name: bench
task: mytask:train
resources: {{nodes: {nodes}, tasks_per_node: {tasks}, time: "2:00:00"}}
retry: {{crash: unlimited, exclude_after: 99}}
checkpoint: {{every: 5s}}
watchdog: 15min
clusters: {{slurm: {{partition: low}}}}
"""

LEAN = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Little memory a process."""

START, STOP, CHECKPOINT, RESTART = "start", "agree on a stop", "checkpoint", "restart in place"


def read(file: Path, seconds: float) -> str:
    """The text of a file, once it is there."""
    wait_until(file.exists, str(file), seconds)
    return file.read_text(encoding="utf-8")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        one
        for one in map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
        if one["event"] == kind
    ]


def measure(nodes: int, tasks: int, repeats: int, patience: float, folder: Path) -> dict[str, list[float]]:
    """Seconds of each part of a run with so many ranks."""
    project = folder / "project"
    project.mkdir()
    (project / "mytask.py").write_text(TASK, encoding="utf-8")
    (project / "bench.yaml").write_text(YAML.format(nodes=nodes, tasks=tasks), encoding="utf-8")
    times: dict[str, list[float]] = {part: [] for part in (START, STOP, CHECKPOINT, RESTART)}
    # Patient daemons, as in tests/soak/sixty_four.py: so many processes on few cores keep everybody waiting.
    with Cluster(folder / "slurm", nodes=nodes, cpus=tasks, gpus=0, grace=120, kill_wait=60, cred_expire=5) as cluster:
        environment = cluster.env | LEAN

        def jobkit(*arguments: str) -> None:
            command = [sys.executable, "-m", "jobkit", *arguments]
            subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True)

        def first_step(attempt: int) -> float:
            return float(read(run / f"step_{attempt}", patience))

        began = time.time()
        jobkit("submit", "bench.yaml", "--cluster", "slurm")
        (run,) = project.glob("runs/bench-*")
        times[START].append(first_step(1) - began)
        attempt = 1
        for _ in range(repeats):
            time.sleep(15)  # some checkpoints, and a snapshot
            began, victim = time.time(), int(read(run / f"pid_{attempt}_{nodes * tasks - 1}", patience))
            os.kill(victim, signal.SIGKILL)
            attempt += 1
            times[RESTART].append(first_step(attempt) - began)
        time.sleep(15)
        times[CHECKPOINT] = [one["seconds"] for one in events(run, "checkpoint")]
        known, began = len(times[CHECKPOINT]), time.time()
        jobkit("cancel", run.name)  # which saves, once all ranks have agreed
        wait_until(lambda: not cluster.command("squeue", "--noheader"), "the job to end", patience)
        last = events(run, "checkpoint")[known:]
        if not last:
            raise SystemExit("the run was cancelled without a checkpoint")
        times[STOP].append(last[-1]["time"] - last[-1]["seconds"] - began)
    return times


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) / (1 << 20)


def shape(text: str) -> tuple[int, int]:
    nodes, _, tasks = text.partition("x")
    return int(nodes), int(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=shape, default=(8, 8), metavar="NODESxTASKS", help="default: 8x8")
    parser.add_argument("--few", type=shape, default=(2, 8), metavar="NODESxTASKS", help="default: 2x8")
    parser.add_argument("--repeats", type=int, default=3, help="of the restart in place")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for each part of it (default: 900)")
    parser.add_argument("--least-memory", type=float, default=14.0, help="GiB for 64 ranks, in proportion for others")
    options = parser.parse_args()
    numbers = {size: size[0] * size[1] for size in (options.many, options.few)}
    many, few = numbers[options.many], numbers[options.few]
    what, against = f"{many} ranks ({options.many[0]} x {options.many[1]}), one machine", f"{few} ranks, per rank"
    if (left := available_gib()) < (needed := options.least_memory * many / 64):
        for part in (START, STOP, CHECKPOINT, RESTART):
            tell(missing(f"{what}: {part}", against, f"{left:.0f} GiB of memory left, {needed:.0f} needed", 1.3))
        return
    times = {}
    for size, ranks in numbers.items():
        with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
            times[ranks] = measure(*size, options.repeats, options.patience, Path(folder))
        print(f"{ranks} ranks: {times[ranks]}", flush=True)
    for part in (START, STOP, CHECKPOINT, RESTART):
        ours, theirs = (statistics.median(times[ranks][part]) for ranks in (many, few))
        repeats = min(len(times[many][part]), len(times[few][part]))
        values = [value * few / many for value in ratios(times[many][part][:repeats], times[few][part][:repeats])]
        note = f"{ours:.2f} s with {many} ranks, {theirs:.2f} s with {few}"
        tell(Row(f"{what}: {part}", against, values, 1.3, note=note))


if __name__ == "__main__":
    main()
