#!/usr/bin/env python3
"""The small imagenet64 on 64 ranks: 8 nodes x 8 tasks of a real Slurm on this machine, preempted once.

    tests/soak/sixty_four.py                       # ten minutes or so on two cores, with 20 GiB of memory
    tests/soak/sixty_four.py --nodes 2 --tasks 2   # the same in small

Submits experiments/imagenet64.yaml, lets it train some steps, takes its nodes away by a job of higher priority, waits
until it has continued and finished, and checks that every attempt had all ranks, that no step was repeated and that
TensorBoard has each once. The exit code is 0 only if all is so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

if (
    importlib.util.find_spec("jobkit") is None
    and (python := Path(__file__).resolve().parents[2] / ".venv/bin/python").exists()
):
    os.execv(python, [str(python), *sys.argv])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness.project import logged_steps, status, step, wait_for
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster, MissingPackages

ROOT = Path(__file__).resolve().parents[2]

TINY = [
    *("params.unet.width=8", "params.unet.multipliers=[1]", "params.unet.attention=[]", "params.unet.head=8"),
    *("params.solver=euler", "params.solver_steps=1", "params.validate_every=1000000", "params.batch=128"),
    *("checkpoint.every=1000000", "watchdog=15min", "resources.time=1:00:00"),
]
"""A model and a validation that leave the time to what is tried here: many ranks."""

LEAN = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Little memory a process."""

GIB = 1 << 30

OVER = ("finished", "failed", "cancelled")


class Memory(threading.Thread):
    """Watches how much memory is left; stops the run when that is too little."""

    def __init__(self, least: float) -> None:
        super().__init__(daemon=True)
        self.least = least
        self.before = self.lowest = self.available()
        self.start()

    @staticmethod
    def available() -> float:
        """GiB that processes could still be given."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024 / GIB

    def run(self) -> None:
        while True:
            self.lowest = min(self.lowest, self.available())
            time.sleep(0.5)

    def check(self) -> None:
        """Raise MemoryError where less was left than there must be."""
        if self.lowest < self.least:
            raise MemoryError(f"only {self.lowest:.1f} GiB of memory were left")


def verdict(run: Path, ranks: int, steps: int) -> list[str]:
    """What is wrong with a finished run that was preempted once; nothing is repeated by a preemption."""
    now, problems = status(run), []
    ends = [(attempt["cause"], attempt["first_step"], attempt["last_step"]) for attempt in now["attempts"]]
    if now["state"] != "finished" or [cause for cause, _, _ in ends] != ["preempted", "finished"]:
        problems.append(f"{now['state']}, attempts {ends}: expected a preempted one and a finished one")
    elif [first for _, first, _ in ends] != [0, ends[0][2]] or ends[-1][2] != steps:
        problems.append(f"attempts {ends}: steps were repeated or left out")
    for number in range(1, len(ends) + 1):
        if (logs := len(list(run.glob(f"logs/{number}/rank_*.out")))) != ranks:
            problems.append(f"attempt {number} had {logs} ranks instead of {ranks}")
    for file in sorted(run.glob("checkpoints/step_*/manifest.json")):
        if (world := json.loads(file.read_text())["world_size"]) != ranks:
            problems.append(f"{file.parent.name} was written by {world} ranks instead of {ranks}")
    if not list(run.glob("checkpoints/step_*/manifest.json")):
        problems.append("no checkpoint")
    if (logged := logged_steps(run)) != list(range(steps)):
        problems.append(f"TensorBoard has steps {logged} instead of each up to {steps} once")
    return problems


class Trial:
    """The run, and how long each part of it took."""

    def __init__(self, cluster: Cluster, options: argparse.Namespace, memory: Memory, runs: Path) -> None:
        self.cluster, self.options, self.memory, self.runs = cluster, options, memory, runs
        self.run = runs
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """A line with the time since the beginning and the memory that is left."""
        seconds = time.monotonic() - self.began
        print(f"{seconds:6.0f} s  {Memory.available():5.1f} GiB left  {text}", flush=True)

    def submit(self) -> None:
        """Put the experiment into the queue."""
        options = self.options
        place = [f"resources.nodes={options.nodes}", f"resources.tasks_per_node={options.tasks}"]
        own = [f"params.steps={options.steps}", f"params.data={self.runs}/digits/train_8/box", "name=sixty-four"]
        command = [sys.executable, "-m", "jobkit.submit", "experiments/imagenet64.yaml", "--demo", "--cluster", "slurm"]
        command += ["--runs-dir", str(self.runs), *place, *own, *TINY]
        subprocess.run(command, cwd=ROOT, env=self.cluster.env | LEAN, check=True, stdout=subprocess.DEVNULL)
        (self.run,) = (file.parent for file in self.runs.glob("*/config.yaml"))
        self.say(f"submitted as job {status(self.run)['job_id']}")

    def wait(self, what: str, reached: Callable[[], object]) -> None:
        """Until it is so; not for longer than the patience allows, nor with too little memory left."""

        def checked() -> object:
            self.memory.check()
            return reached()

        wait_for(what, checked, self.run, self.options.patience)
        self.say(f"{what}: {status(self.run)['state']}, step {max(step(self.run), 0)}")

    def trained(self, attempt: int, steps: int) -> bool:
        """Whether an attempt has done this many steps, or the run is over."""
        now = status(self.run)
        return now["state"] in OVER or (len(now["attempts"]) == attempt and step(self.run) >= steps)

    def go(self) -> list[str]:
        """Submit, preempt, wait; returns what is wrong."""
        options = self.options
        self.submit()
        self.wait("attempt 1 has begun", lambda: self.trained(1, 0))
        self.wait("attempt 1 has trained", lambda: self.trained(1, options.preempt_after))
        self.cluster.preempt(status(self.run)["job_id"])
        self.wait("attempt 1 was preempted", lambda: status(self.run)["attempts"][0]["ended"])
        self.wait("attempt 2 has begun", lambda: self.trained(2, 0))
        self.wait("attempt 2 has trained", lambda: self.trained(2, options.steps))
        self.wait("the run is over", lambda: status(self.run)["state"] in OVER)
        return verdict(self.run, options.nodes * options.tasks, options.steps)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="default: 8")
    parser.add_argument("--tasks", type=int, default=8, help="a node (default: 8)")
    parser.add_argument("--steps", type=int, default=24, help="default: 24")
    parser.add_argument("--preempt-after", type=int, default=8, help="steps (default: 8)")
    parser.add_argument("--least-memory", type=float, default=3.0, help="GiB; with less left it stops (default: 3)")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for each part of it (default: 600)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    memory = Memory(options.least_memory)
    # Patient daemons: so many processes on few cores keep everybody waiting.
    settings = {"nodes": options.nodes, "cpus": options.tasks, "gpus": 0}
    patient = {"grace": 120, "kill_wait": 60}
    # What is asked is whether 64 ranks go on, not when: two minutes in BeginTime would tell nothing.
    quick = {"cred_expire": QUICK["cred_expire"]}
    with (
        tempfile.TemporaryDirectory(prefix="jobkit-64-", dir="/tmp") as directory,  # short: for Slurm's sockets
        tempfile.TemporaryDirectory(prefix="jobkit-64-runs-") as runs,
    ):
        try:
            with Cluster(directory, **settings, **patient, **quick) as cluster:
                trial = Trial(cluster, options, memory, Path(runs))
                trial.say(f"{options.nodes} nodes are up")
                problems = trial.go()
                trial.say("; ".join(problems) or f"finished at step {options.steps}, nothing repeated, all ranks there")
        except MissingPackages as missing:
            print(missing, file=sys.stderr)
            return 2
        except MemoryError as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 1
    used = memory.before - memory.lowest
    print(f"memory: {used:.1f} GiB more than before at the peak, {memory.lowest:.1f} GiB left")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
