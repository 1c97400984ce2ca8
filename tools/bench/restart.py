"""What a death costs: from the kill of a rank, or of a node, to the first new step, part by part.

In place, beside a requeue of the same job and a plain srun of the same function from nothing, 2 nodes x 2 ranks. And
what a preemption costs, without the wait in the queue: from the signal until the job has asked to be requeued, and from
the prolog of its next start to the first new step.
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

from measured import Row, absolute, ratios, tell
from slurm_cluster import Cluster, wait_until

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
        done = subprocess.run(command, cwd=self.project, env=self.environment, capture_output=True, encoding="utf-8")
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

    def seconds_of_a_preemption(self, cluster: Cluster, starts: Path) -> float:
        """From the loss of its nodes to a job of higher priority until the first new step, without the queue."""
        time.sleep(2.5)
        job_id = self.status()["job_id"]
        cluster.preempt(job_id)
        signalled = time.time()
        self.attempt += 1
        first_step = self.first_step(self.attempt)
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        requeued = max(one["time"] for one in map(json.loads, lines) if one["event"] == "requeued")
        begun = [
            float(when)
            for job, when in map(str.split, starts.read_text(encoding="utf-8").splitlines())
            if job == job_id
        ]
        return requeued - signalled + first_step - min(when for when in begun if when > requeued)

    def status(self) -> dict[str, Any]:
        return json.loads(self.jobkit("status", self.path.name, "--json"))  # type: ignore[no-any-return]

    def kill_rank(self, rank: int) -> None:
        os.kill(int(read(self.path / f"pid_{self.attempt}_{rank}")), signal.SIGKILL)

    def parts(self) -> list[dict[str, float]]:
        """What each restart took, part by part."""
        time.sleep(1.0)  # the journal gets the first step's event within that
        return [one["restart"] for one in self.status()["attempts"] if one["restart"]]


def read(file: Path, seconds: float = 600.0) -> str:
    """The text of a file, once it is there."""
    until = time.monotonic() + seconds
    while not (file.exists() and (text := file.read_text(encoding="utf-8"))):
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


PROLOG = """\
#!/bin/sh
echo $SLURM_JOB_ID $(date +%s.%N) >> {starts}
"""


def preempted(project: Path, folder: Path, repeats: int) -> None:
    """What the queue waits for is taken out, so a requeued job need not wait for two minutes here."""
    prolog, starts = folder / "prolog", folder / "starts"
    prolog.write_text(PROLOG.format(starts=starts), encoding="utf-8")
    prolog.chmod(0o755)
    with Cluster(folder / "slurm", nodes=2, cred_expire=5, prolog=str(prolog)) as cluster:
        environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}
        run = Run(project, environment)
        seconds = [run.seconds_of_a_preemption(cluster, starts) for _ in range(repeats)]
        run.jobkit("cancel", run.path.name)
        wait_until(lambda: not cluster.command("squeue", "--noheader"), "the queue to be empty")
        bare = [plain(project, environment, repeat) for repeat in range(repeats)]
    report("preempted, without the queue", seconds, [])
    report("plain srun, from nothing", bare, [])
    note = absolute(seconds, bare)
    tell(Row("preempted to next step, queue taken out", PLAIN_SRUN, ratios(seconds, bare), 1.2, note=note))


PLAIN_SRUN = "plain srun of the same function, from nothing"


def deaths(project: Path, folder: Path, repeats: int, cred_expire: int) -> None:
    with Cluster(folder / "slurm", nodes=3, cred_expire=cred_expire) as cluster:
        environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}
        run = Run(project, environment, "resources.spares=1")
        in_place = [run.seconds_after(lambda: run.kill_rank(3)) for _ in range(repeats)]
        parts = run.parts()
        report("a rank, in place", in_place, parts)
        lost = run.seconds_after(lambda: cluster.kill_node("node2"))
        report("a node, with a spare", [lost], run.parts()[repeats:])
        restarts = int(cluster.job(run.status()["job_id"])["Restarts"])
        run.jobkit("cancel", run.path.name)
        cluster.restart_node("node2")
        bare = [plain(project, environment, repeat) for repeat in range(repeats)]
        report("plain srun, from nothing", bare, [])
        note = f"{absolute(in_place, bare)}; the job was requeued {restarts} times"
        tell(Row("dead rank to next step", PLAIN_SRUN, ratios(in_place, bare), 0.5, note=note))
        tell(
            Row(
                "lost node to next step, with a spare",
                PLAIN_SRUN,
                [lost / statistics.median(bare)],
                note=f"{lost:.2f} s",
            )
        )
        run = Run(project, environment, "retry.in_place=false")
        requeued = run.seconds_after(lambda: run.kill_rank(3))
        report("a rank, requeued", [requeued], run.parts())
        run.jobkit("cancel", run.path.name)
        note = f"{requeued:.1f} s with cred_expire={cred_expire}"
        tell(
            Row("dead rank to next step by a requeue", "in place", [requeued / statistics.median(in_place)], note=note)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["deaths", "preempted"], help="default: both")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cred-expire", type=int, default=120, help="where ranks and nodes die")
    options = parser.parse_args()
    for part in [options.part] if options.part else ["deaths", "preempted"]:
        with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
            project = Path(folder) / "project"
            project.mkdir()
            for name, text in (("mytask.py", TASK), ("plain.py", PLAIN), ("bench.yaml", YAML)):
                (project / name).write_text(text, encoding="utf-8")
            if part == "deaths":
                deaths(project, Path(folder), options.repeats, options.cred_expire)
            else:
                preempted(project, Path(folder), options.repeats)


if __name__ == "__main__":
    main()
