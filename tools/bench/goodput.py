"""Goodput where a rank is killed every minute: useful steps over those of an undisturbed loop in the same time.

jobkit, Submitit's checkpoint() pattern and Lightning with `auto_requeue=True`, one after the other on a private Slurm,
one node with two ranks. Submitit's job and Lightning's end as FAILED when a rank is killed, and nothing starts them
again. They are given what a person could do at best: a watcher submits them again the moment Slurm says that they have
ended, and there is no queue. They save every five seconds, jobkit when it finds that it should.

Young's optimum is that of a program with jobkit's own costs: with C seconds for which a save holds up the loop and R
from a kill to the first new step, and a failure every M seconds, it keeps 1 - sqrt(2 C / M) - R / M of the time
(J. W. Young, 1974), however it saves.
    python tools/bench/goodput.py --seconds 300 --every 60
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, is_installed, missing, tell
from slurm_cluster import Cluster, wait_until

STEPS = """\
import os
import time

import torch
from torch import nn

WIDTH, BATCH, SLEEP_SECONDS = 512, 8, 0.04
SAVE_STEPS = 100  # about five seconds


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


def batch():
    time.sleep(SLEEP_SECONDS)
    return torch.randn(BATCH, WIDTH)


class Told:
    # Rank 0 writes down each step that is done; rank 1 is the one to be killed.
    def __init__(self, rank):
        torch.set_num_threads(1)
        self.rank = rank
        self.steps = open("steps", "ab", buffering=0) if rank == 0 else None

    def step(self, step):
        if self.steps is not None:
            self.steps.write(f"{os.getpid()} {step} {time.time()}\\n".encode())
        elif self.rank == 1:
            with open("pid.new", "w") as file:
                file.write(str(os.getpid()))
            os.replace("pid.new", "pid")
            self.rank = None
"""

TASK = """\
import steps


def train(ctx):
    model = ctx.parallelize(steps.model())
    optimizer = steps.adamw(model)
    ctx.track(model=model, optimizer=optimizer)
    told = steps.Told(ctx.rank)
    for step in ctx.steps(10**7):
        loss = model(steps.batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
        told.step(step)
"""

YAML = """\
name: goodput
task: mytask:train
resources: {nodes: 1, tasks_per_node: 2, time: "1:00:00"}
retry: {crash: unlimited, exclude_after: 99}
clusters: {slurm: {partition: low}}
"""

PLAIN = """\
import os

import torch
import torch.distributed as dist

import steps


def loop(rank, world, begun=0, save=None, state=None):
    net = steps.model()
    optimizer = steps.adamw(net)
    if state is not None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model = torch.nn.parallel.DistributedDataParallel(net)
    told = steps.Told(rank)
    for step in range(begun, 10**7):
        model(steps.batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told.step(step)
        if save is not None and (step + 1) % steps.SAVE_STEPS == 0 and rank == 0:
            save({"step": step + 1, "model": net.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=world)
    loop(rank, world)
"""

SUBMITIT = """\
import os

import submitit
import torch
import torch.distributed as dist

import plain


def save(state):
    torch.save(state, "last.new")
    os.replace("last.new", "last.pt")


class Trainer:
    def __call__(self):
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the names of a private Slurm's nodes do not resolve
        dist.init_process_group("gloo")
        state = torch.load("last.pt") if os.path.exists("last.pt") else None
        plain.loop(dist.get_rank(), dist.get_world_size(), state["step"] if state else 0, save, state)

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(Trainer())


if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder="logs")
    executor.update_parameters(partition="low", time=60, nodes=1, ntasks_per_node=2, cpus_per_task=1)
    print(executor.submit(Trainer()).job_id)
"""

LIGHTNING = """\
import os
import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

import steps

os.environ["MASTER_ADDR"] = "127.0.0.1"  # the names of a private Slurm's nodes do not resolve


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield steps.batch()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = steps.model()

    def training_step(self, batch, number):
        loss = self.net(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return steps.adamw(self)


class Tell(Callback):
    def setup(self, trainer, module, stage):
        self.told = steps.Told(trainer.global_rank)

    def on_train_batch_end(self, trainer, *_):
        self.told.step(trainer.global_step - 1)


checkpoints = ModelCheckpoint("checkpoints", every_n_train_steps=steps.SAVE_STEPS, save_last=True)
trainer = Trainer(
    max_steps=10**7, accelerator="cpu", devices=2, num_nodes=1, strategy="ddp", callbacks=[Tell(), checkpoints],
    plugins=[SLURMEnvironment(auto_requeue=True)], logger=TensorBoardLogger("logs"), log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None), ckpt_path="last")
"""

FILES = {
    "steps.py": STEPS, "mytask.py": TASK, "bench.yaml": YAML, "plain.py": PLAIN, "bare.py": SUBMITIT,
    "pl.py": LIGHTNING,
}  # fmt: skip

SBATCH = ["sbatch", "--parsable", "--partition=low", "--nodes=1", "--ntasks-per-node=2", "--requeue", "--time=60"]

COMMANDS = {
    "by hand": [*SBATCH, f"--wrap=srun {sys.executable} plain.py"],
    "jobkit": [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--cluster", "slurm", "--json"],
    "Submitit's pattern": [sys.executable, "bare.py"],
    "Lightning": [*SBATCH, f"--wrap=srun --kill-on-bad-exit=1 {sys.executable} pl.py"],
}

ENDED = ("FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


@dataclass(frozen=True)
class Step:
    process: int
    number: int
    time: float


@dataclass
class Contest:
    """What became of one contender."""

    seconds: float
    steps: list[Step] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    submissions: int = 1

    @property
    def useful(self) -> int:
        """Steps that the run had at the end, each counted once."""
        return self.steps[-1].number + 1

    @property
    def repeated(self) -> int:
        return len(self.steps) - len({step.number for step in self.steps})

    @property
    def restarts(self) -> list[float]:
        """Seconds from each kill to the first step of the processes after it."""
        found = []
        for kill in self.kills:
            dead = {step.process for step in self.steps if step.time <= kill}
            if after := [step.time for step in self.steps if step.time > kill and step.process not in dead]:
                found.append(min(after) - kill)
        return found


def steps_of(file: Path) -> list[Step]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Step(int(process), int(number), float(when)) for process, number, when in map(str.split, lines)]


def contend(name: str, project: Path, cluster: Cluster, seconds: float, every: float) -> Contest:
    """Train for so long from the first step on, and kill a rank in the middle of each `every` seconds."""
    project.mkdir()
    for file, text in FILES.items():
        (project / file).write_text(text, encoding="utf-8")
    environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}

    def submit() -> str:
        done = subprocess.run(COMMANDS[name], cwd=project, env=environment, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout}{done.stderr}")
        return str(json.loads(done.stdout)["job_id"]) if name == "jobkit" else done.stdout.strip()

    contest, pid = Contest(seconds), project / "pid"
    job_id = submit()
    wait_until(lambda: (project / "steps").exists(), f"{name}: the first step")
    began = time.time()
    next_kill = every / 2 if every else math.inf
    while (now := time.time()) < began + seconds:
        if now - began >= next_kill:
            next_kill += every
            if pid.exists():  # else it does not train again yet: there is nothing to be lost
                number = int(pid.read_text(encoding="utf-8"))
                pid.unlink()
                os.kill(number, signal.SIGKILL)
                contest.kills.append(time.time())
        if name != "jobkit" and cluster.job(job_id)["JobState"] in ENDED:
            job_id, contest.submissions = submit(), contest.submissions + 1
        time.sleep(0.2)
    contest.steps = [step for step in steps_of(project / "steps") if step.time <= began + seconds]
    if name == "jobkit":
        (run,) = project.glob("runs/goodput-*")
        ending = [sys.executable, "-m", "jobkit", "cancel", run.name]
    else:
        ending = ["scancel", "--me"]
    subprocess.run(ending, cwd=project, env=environment, check=True, capture_output=True)
    wait_until(lambda: not cluster.command("squeue", "--noheader"), "the queue to be empty")
    return contest


def stalls_of(project: Path) -> list[float]:
    """Seconds for which the checkpoints of a run of jobkit's held it up."""
    (journal,) = project.glob("runs/goodput-*/events.jsonl")
    events = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return [event["stall"] for event in events if event["event"] == "checkpoint"]


def youngs_optimum(cost: float, restart: float, mtbf: float) -> float:
    """The part of the time that is kept at the best interval between saves: all three in seconds."""
    return 1 - math.sqrt(2 * cost / mtbf) - restart / mtbf


def goodput(contest: Contest, by_hand: float) -> float:
    """Useful steps over those that the loop by hand, of so many seconds a step, does in the time."""
    return contest.useful / (contest.seconds / by_hand)


def step_seconds(steps: Sequence[Step]) -> float:
    return (steps[-1].time - steps[0].time) / (len(steps) - 1)


def describe(name: str, contest: Contest, kept: float) -> str:
    restarts = f"{statistics.mean(contest.restarts):.1f} s" if contest.restarts else "none"
    return (
        f"{name}: {kept:.3f}; {len(contest.kills)} kills, {restarts} to the next step on average, "
        f"{contest.repeated} steps repeated, {contest.submissions} submissions"
    )


def measure(options: argparse.Namespace, folder: Path, what: str) -> None:
    # Slurm requeues nothing here, so how long it lets a requeued job wait does not matter.
    with Cluster(folder / "slurm", nodes=1, cred_expire=5) as cluster:

        def trial(contender: str) -> Contest:
            place = folder / contender.replace(" ", "_").replace("'", "")
            return contend(contender, place, cluster, options.seconds, options.every)

        def by_hand(place: str) -> float:
            undisturbed = contend("by hand", folder / place, cluster, min(60.0, options.seconds), 0)
            return step_seconds(undisturbed.steps)

        before = by_hand("before")
        ours = trial("jobkit")
        hand = statistics.mean((before, by_hand("after")))  # the machine may have become slower, or faster
        kept = goodput(ours, hand)
        print(describe("jobkit", ours, kept), flush=True)
        cost, restart = statistics.median(stalls_of(folder / "jobkit")), statistics.mean(ours.restarts)
        best = youngs_optimum(cost, restart, options.every)
        note = f"{kept:.3f} against {best:.3f}: a save holds up the loop for {1e3 * cost:.0f} ms, "
        note += f"{restart:.2f} s from a kill to the next step"
        tell(Row(what, "Young's optimum for these costs", [kept / best], 0.97, better="higher", note=note))
        for peer, package in (("Submitit's pattern", "submitit"), ("Lightning", "lightning")):
            if not is_installed(package):
                tell(missing(what, f"{peer}, submitted again at once", f"{package} is not installed", 1.0))
                continue
            theirs = trial(peer)
            others = goodput(theirs, hand)
            note = f"{kept:.3f} against {others:.3f}. {describe(peer, theirs, others)}"
            against = f"{peer}, submitted again at once"
            tell(Row(what, against, [kept / others], 1.0, better="higher", below=True, note=note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    options = parser.parse_args()
    what = f"goodput, a rank killed every {options.every:g} s for {options.seconds:g} s"
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as name:
        measure(options, Path(name), what)


if __name__ == "__main__":
    main()
