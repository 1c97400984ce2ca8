#!/usr/bin/env python3
"""Scripts of examples/ under jobkit, and beside it Lightning's own requeueing and Trainer's own checkpoints.

    tests/soak/adopted.py                              # half an hour on two cores
    tests/soak/adopted.py --only preempted,rank_killed

On a private Slurm, two nodes with one rank each, a checkpoint every 20 steps of 240, the same interruption for all at
about step 50. Each script counts its own steps: those beyond 240 were computed twice. Prints a row of the table in
docs/evidence.md for each script and interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("torch") is None and (python := ROOT / ".venv/bin/python").exists():
    os.execv(python, [str(python), *sys.argv])
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from harness.examples import EXAMPLES  # noqa: E402
from harness.project import Project, status  # noqa: E402
from slurm_cluster import Cluster, free_ports  # noqa: E402

STEPS, AT = 240, 50
PATIENCE = 420.0
"""Seconds after which a run that neither ends nor is lost is given up."""

PACE = """\
# Counts this rank's steps, and makes them so long that an interruption finds them at work.
import os
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
Path(f"pid_{rank}").write_text(str(os.getpid()))


def step(*_):
    with open(f"steps_{rank}", "a") as file:
        file.write("1\\n")
    time.sleep(SECONDS)


register_optimizer_step_post_hook(step)
"""

YAML = """\
name: NAME
command: [python, train.py, --epochs, "40"]
resources: {nodes: 2, tasks_per_node: 1, time: "TIME"}
checkpoint: {every: 20}
clusters: {slurm: {partition: low}}
"""

BATCH = """\
#!/bin/bash
#SBATCH --job-name=NAME --partition=low --nodes=2 --ntasks-per-node=1 --time=TIME
#SBATCH --requeue --open-mode=append --output=log.txt --signal=SIGUSR1@30
export MASTER_ADDR=127.0.0.1 MASTER_PORT=PORT
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
exec srun bash -c 'export RANK=$SLURM_PROCID; exec python train.py --epochs 40'
"""

LIGHTNING_OWN = (
    ("devices=args.devices,", "devices=1, num_nodes=2, plugins=[SLURMEnvironment(auto_requeue=True)],"),
    (
        "max_epochs=args.epochs,",
        'max_epochs=args.epochs, callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=20, save_last=True)],',
    ),
    ("make_loader(64, 2))", 'make_loader(64, 2), ckpt_path="last")'),
    (
        "import torch\n",
        "import torch\nfrom lightning.pytorch.callbacks import ModelCheckpoint\n"
        "from lightning.pytorch.plugins.environments import SLURMEnvironment\n",
    ),
)
TRAINER_OWN = (
    ('save_strategy="no",', 'save_strategy="steps", save_steps=20, enable_jit_checkpoint=True,'),
    ("trainer.train()", "trainer.train(resume_from_checkpoint=get_last_checkpoint('output'))"),
    ("import torch\n", "import torch, os\nfrom transformers.trainer_utils import get_last_checkpoint\n"),
    ("    set_seed(1)\n", "    set_seed(1)\n    os.makedirs('output', exist_ok=True)\n"),
)
NODES = (("devices=args.devices,", "devices=1, num_nodes=2,"),)

SUBJECTS = {
    "a plain loop, jobkit": ("plain", "after.py", ()),
    "Hugging Face, jobkit": ("huggingface", "after.py", ()),
    "Lightning, jobkit": ("lightning", "after.py", NODES),
    "Hugging Face, `enable_jit_checkpoint=True`": ("huggingface", "before.py", TRAINER_OWN),
    "Lightning, `auto_requeue=True`": ("lightning", "before.py", LIGHTNING_OWN),
}


class Subject(Project):
    """One script, submitted as its users would."""

    def __init__(self, path: Path, label: str, cluster: Cluster, limit: str, seconds: float) -> None:
        self.label, self.cluster = label, cluster
        self.folder, file, replaced = SUBJECTS[label]
        super().__init__(path, {**cluster.env, "PYTHONPATH": str(ROOT)})
        self.is_jobkits = file == "after.py"
        shutil.copytree(EXAMPLES / self.folder, path, dirs_exist_ok=True)
        text = (path / file).read_text()
        for old, new in replaced:
            assert text.count(old) == 1, (label, old)
            text = text.replace(old, new)
        (path / "train.py").write_text("import pace\n" + text)
        (path / "pace.py").write_text(PACE.replace("SECONDS", str(seconds)))
        (path / "toy.yaml").write_text(YAML.replace("NAME", self.folder).replace("TIME", limit))
        port = str(free_ports(1)[0])
        batch = BATCH.replace("NAME", self.folder).replace("TIME", limit).replace("PORT", port)
        (path / "batch.sh").write_text(batch)
        self.id = self._submit()

    def _submit(self) -> str:
        if self.is_jobkits:
            self.submit("--cluster", "slurm")
            return str(status(self.runs[0])["job_id"])
        return self.cluster.command("sbatch", "--parsable", f"--chdir={self.path}", str(self.path / "batch.sh")).strip()

    @property
    def steps(self) -> int:
        """How many its rank 0 has computed, in all attempts."""
        file = self.path / "steps_0"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def job(self) -> str:
        return str(status(self.runs[0])["job_id"]) if self.is_jobkits else self.id

    def kill_rank(self) -> None:
        os.kill(int((self.path / "pid_1").read_text()), signal.SIGKILL)

    def ended(self) -> str | None:
        """How the run has ended; None while it may go on."""
        if self.is_jobkits:
            state = status(self.runs[0]).get("state")
            return state if state in ("finished", "failed", "cancelled") else None
        state = self.cluster.job(self.id)["JobState"]
        return None if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED") else state

    def weights(self) -> bytes | None:
        for file in (self.path / "weights.pt", self.path / "model/model.safetensors"):
            if file.exists():
                return file.read_bytes()
        return None


def preempted(cluster: Cluster, subjects: list[Subject]) -> None:
    place = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", f"--chdir={cluster.dir}"]
    cluster.command("sbatch", *place, "--wrap=sleep 1")


def requeued(cluster: Cluster, subjects: list[Subject]) -> None:
    for subject in subjects:
        cluster.command("scontrol", "requeue", subject.job)


def rank_killed(cluster: Cluster, subjects: list[Subject]) -> None:
    for subject in subjects:
        subject.kill_rank()


def node_lost(cluster: Cluster, subjects: list[Subject]) -> None:
    cluster.kill_node("node2")
    wait(lambda: "down" in cluster.node_state("node2"), 120)
    time.sleep(2)
    cluster.restart_node("node2")


def nothing(cluster: Cluster, subjects: list[Subject]) -> None:
    """Of the time limit, or not at all."""


INTERRUPTIONS: dict[str, tuple[Callable[[Cluster, list[Subject]], None], str, float]] = {
    "uninterrupted": (nothing, "0:30:00", 0.0),
    "preempted": (preempted, "0:30:00", 0.1),
    "requeued": (requeued, "0:30:00", 0.1),
    "rank_killed": (rank_killed, "0:30:00", 0.1),
    "node_lost": (node_lost, "0:30:00", 0.1),
    "time_limit": (nothing, "0:01:00", 0.25),
}
"""What is done, the job's limit, and how long a step takes."""


def wait(reached: Callable[[], bool], seconds: float) -> bool:
    """Whether it came to be within so many seconds."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


@contextlib.contextmanager
def new_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="jobkit-slurm-", dir="/tmp") as folder:
        settings = {"nodes": 2, "grace": 10, "kill_wait": 10, "cred_expire": 5, "slurmd_timeout": 20}
        with Cluster(f"{folder}/s", **settings) as cluster:
            yield cluster


def round_of(name: str, labels: list[str], folder: Path, whole: dict[str, bytes | None]) -> None:
    """All scripts side by side through one kind of interruption; prints their rows."""
    act, limit, seconds = INTERRUPTIONS[name]
    with new_cluster() as cluster:
        subjects = [
            Subject(folder / name / str(number), label, cluster, limit, seconds) for number, label in enumerate(labels)
        ]
        if act is not nothing:
            wait(lambda: all(one.steps >= AT for one in subjects), 240)
            before = {one.label: one.steps for one in subjects}
            act(cluster, subjects)
        else:
            before = {}
        wait(lambda: all(one.ended() for one in subjects), PATIENCE)
        for one in subjects:
            end, weights = one.ended() or "not ended", one.weights()
            if name == "uninterrupted":
                whole[one.label] = weights
            exact = "-" if weights is None else "yes" if weights == whole.get(one.label) else "no"
            repeated = str(one.steps - STEPS) if weights is not None else f"lost at step {one.steps}"
            print(
                f"| {one.label} | {name} at {before.get(one.label, '-')} | {end} | {repeated} | {exact} |", flush=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(INTERRUPTIONS), help="interruptions, with commas between them")
    parser.add_argument("--dir", type=Path, help="a new folder for what the runs leave; else it is removed")
    options = parser.parse_args()
    whole: dict[str, bytes | None] = {}
    print("| script | interrupted | end | steps repeated | exact |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="jobkit-adopted-") as temporary:
        for name in dict.fromkeys(["uninterrupted", *options.only.split(",")]):
            round_of(name, list(SUBJECTS), options.dir or Path(temporary), whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
