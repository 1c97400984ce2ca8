"""Measure what jobkit costs for many runs: a list of thousands, a sweep of a thousand, a hundred that are cancelled.

    .venv/bin/python tools/bench/many.py [list sweep cancel] [--repeats 3] [--quick]

Each part has two things in one run, so that a busy machine slows both: `list` beside a Python that only reads the same
files, a sweep beside bare Submitit and beside sbatch, `cancel` beside one scancel. Slurm is a private one (slurmbox).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from harness.runs import Project, wait_until  # noqa: E402
from launch import cluster_project, seconds  # noqa: E402
from slurmbox import Cluster  # noqa: E402
from table import QUICK, options, show  # noqa: E402

from jobkit.run.journal import Journal  # noqa: E402
from jobkit.run.records import AttemptBegan, AttemptEnded, Finished, Submitted  # noqa: E402
from jobkit.run.rundir import RunDir  # noqa: E402

READ = """\
import json, os, sys

folder = sys.argv[1]
for name in os.listdir(folder):
    os.stat(f"{folder}/{name}/events.jsonl")
    with open(f"{folder}/{name}/status.json") as file:
        json.load(file)
"""

BARE = """\
import sys

import submitit

from scripted_rank import train

executor = submitit.SlurmExecutor(folder="logs")
executor.update_parameters(partition="low", time=5, nodes=1, ntasks_per_node=1, cpus_per_task=1)
for _ in range(int(sys.argv[1])):
    executor.submit(train, None)
"""

RUNS = 100 if QUICK else 10_000
POINTS = 10 if QUICK else 1000
BARE_SUBMISSIONS = 2 if QUICK else 100
"""Measured, and scaled to as many as the points: each takes the same time."""

CANCELLED = 3 if QUICK else 100


def measure_list(repeats: int) -> None:
    """`list` of finished runs, and how long Python needs to read their files."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        project = Project(Path(folder, "project"))
        runs = project.folder / "runs"
        make_runs(runs)
        ours, reading = [], []
        for _ in range(repeats + 1):
            ours.append(seconds(project, *project.words("list")))
            reading.append(seconds(project, project.python, "-c", READ, str(runs)))
    show(f"list of {RUNS:,} finished runs", ours[1:], 1.0)
    show("a Python that reads the same files", reading[1:], None)


def make_runs(folder: Path) -> None:
    """Make runs with a finished attempt each; all are copies of the first, with another name and other params."""
    first = RunDir(folder / "bench-00000000")
    first.path.mkdir(parents=True)
    first.config_file.write_text("name: bench\n")
    journal = Journal(first)
    params = {"lr": 0.1, "number": 10_000_000}
    token = f"jobkit:{first.name}:1:abcdef"
    config = {"name": "bench", "seed": 0, "params": params}
    journal.append(Submitted(token=token, number=1, scheduler="local", user="somebody", host="here", config=config))
    journal.append(AttemptBegan(attempt=1, token=token, job_id="local-here-1"))
    journal.append(
        AttemptEnded(attempt=1, cause="finished", next="stop", first_step=0, last_step=100, durable_step=100)
    )
    journal.append(Finished(result={"loss": 0.5}, step=100))
    texts = {file: file.read_text() for file in (first.config_file, first.journal_file, first.status_file)}
    for number in range(1, RUNS):
        run = RunDir(folder / f"bench-{number:08x}")
        run.path.mkdir()
        for file, text in texts.items():  # of the same length: status.json names the journal's
            text = text.replace(first.name, run.name).replace("10000000", str(10_000_000 + number))
            (run.path / file.name).write_text(text)


def measure_sweep(repeats: int) -> None:
    """A sweep until its job id, and once more when all is in the queue; no job starts, as the partition is down."""
    for _ in range(repeats):
        with cluster_project(nodes=1) as (cluster, project):
            cluster.command("scontrol", "update", "PartitionName=low", "State=DOWN")
            project.write("bare.py", BARE)
            words = project.words("submit", str(project.yaml), "--cluster", "slurm", "--sweep")
            first = seconds(project, *words, f"seed=range({POINTS})")
            assert tasks(cluster) == POINTS
            again = seconds(project, *words, f"seed=range({POINTS})")
            assert tasks(cluster) == POINTS
            clear(cluster)
            bare = seconds(project, project.python, "bare.py", str(BARE_SUBMISSIONS)) / BARE_SUBMISSIONS * POINTS
            clear(cluster)
            script = 'for i in $(seq "$0"); do sbatch --parsable -o/dev/null --wrap=true; done'
            loop = seconds(project, "bash", "-ec", script, str(BARE_SUBMISSIONS)) / BARE_SUBMISSIONS * POINTS
            clear(cluster)
        show(f"sweep of {POINTS:,} points", [first], None)
        show("the same command again", [again], None)
        show(f"bare Submitit, {BARE_SUBMISSIONS} scaled to {POINTS:,}", [bare], None)
        show(f"a loop of sbatch, {BARE_SUBMISSIONS} scaled to {POINTS:,}", [loop], None)
        show("sweep / bare Submitit", [first / bare], 0.1, "times")


def measure_cancel(repeats: int) -> None:
    """`cancel` of runs in the queue, each a task of an array, and one scancel of as many jobs."""
    ours, plain = [], []
    with cluster_project(nodes=1) as (cluster, project):
        cluster.command("scontrol", "update", "PartitionName=low", "State=DOWN")
        for number in range(repeats):
            first, last = number * CANCELLED, (number + 1) * CANCELLED
            sweep = project.jobkit(
                *("submit", str(project.yaml), "--cluster", "slurm", "--sweep", f"seed=range({first},{last})")
            )
            name = sweep.stdout.split()[1].rstrip(":")
            assert tasks(cluster) == CANCELLED
            ours.append(seconds(project, *project.words("cancel", "-y", name)))
            assert tasks(cluster) == 0
            ids = [cluster.command("sbatch", "--parsable", "-o/dev/null", "--wrap=true") for _ in range(CANCELLED)]
            plain.append(seconds(project, "scancel", *ids))
            clear(cluster)
    show(f"cancel of {CANCELLED} queued runs", ours, 1.0)
    show(f"one scancel of {CANCELLED} jobs", plain, None)


def tasks(cluster: Cluster) -> int:
    return len(cluster.command("squeue", "--noheader", "--array").splitlines())


def clear(cluster: Cluster) -> None:
    subprocess.run(["scancel", "--me"], env=cluster.env, check=True)
    wait_until(lambda: not tasks(cluster), "an empty queue")


PARTS = {"list": measure_list, "sweep": measure_sweep, "cancel": measure_cancel}


def main() -> None:
    arguments = options(__doc__, 3, PARTS).parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it jobkit would be compiled anew at each start
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; least, median, most")
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.repeats)


if __name__ == "__main__":
    main()
