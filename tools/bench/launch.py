"""Measure what jobkit costs around a training: submissions, and the time from a death to the next life.

    .venv/bin/python tools/bench/launch.py [submit help local slurm batch] [--repeats 7] [--quick]

Peers are measured in turn with jobkit, so that a busy machine slows both. Slurm is a private one (slurmbox).

    kill -> supervisor hears of it -> other ranks killed -> attempt closed, begun -> fork -> the ranks write their marks
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from harness.runs import Launch, Project, wait_until  # noqa: E402
from slurmbox import Cluster  # noqa: E402
from table import options, show  # noqa: E402

BARE = """\
import submitit

from scripted_rank import train

executor = submitit.SlurmExecutor(folder="logs")
executor.update_parameters(partition="low", time=5, nodes=2, ntasks_per_node=2, cpus_per_task=1)
print(executor.submit(train, None).job_id)
"""


def seconds(project: Project, *command: str) -> float:
    """Return the wall time of a command that must succeed."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=project.folder, env=project.environment, capture_output=True, text=True)
    elapsed = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    return elapsed


@contextmanager
def cluster_project(**settings: object) -> Iterator[tuple[Cluster, Project]]:
    """A private Slurm and a project whose commands talk to it."""
    temporary = tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp")
    with temporary as folder, Cluster(Path(folder, "slurm"), **settings) as cluster:
        yield cluster, Project(Path(folder, "project"), cluster.env)


def measure_submit(repeats: int) -> None:
    """A submission until the job id, against bare Submitit; the partition is down, so that no job takes the cores."""
    ours: list[float] = []
    bare: list[float] = []
    with cluster_project(nodes=2) as (cluster, project):
        cluster.command("scontrol", "update", "PartitionName=low", "State=DOWN")
        project.write("bare.py", BARE)
        words = project.words("submit", str(project.yaml), "--cluster", "slurm", "resources.nodes=2")
        for number in range(repeats + 1):
            times = (
                seconds(project, *words, "resources.tasks_per_node=2", f"params.steps={number + 1}"),
                seconds(project, project.python, "bare.py"),
            )
            if number:  # the first warms the disk's cache
                ours.append(times[0])
                bare.append(times[1])
    show("submission until the job id", ours, 0.4)
    show("bare Submitit", bare, None)
    show("submission / bare Submitit", [mine / peer for mine, peer in zip(ours, bare, strict=True)], 2.5, "times")


def measure_help(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        for words in (["jobkit", "--help"], ["jobkit.submit", "--help"]):
            times = [seconds(project, project.python, "-m", *words) for _ in range(repeats + 1)]
            show(f"python -m {' '.join(words)}", times[1:], 0.1)


def seconds_to_next_life(launch: Launch, deed: Callable[[], object]) -> float:
    """Return the time from a deed until all ranks of the next attempt have begun."""
    attempt = launch.status.attempts[-1]
    launch.wait_for_attempt(attempt.number)  # before it trains, its step is not known
    launch.wait_for_step(launch.step + 15)
    began = time.time()
    deed()
    marks = [launch.run.outputs / "ranks" / str(rank) for rank in range(attempt.began.ranks)]
    new = f"{attempt.number + 1} "
    wait_until(lambda: all(mark.read_text().startswith(new) for mark in marks), f"attempt {new}")
    return max(mark.stat().st_mtime for mark in marks) - began


def submit(project: Project, *words: str) -> Launch:
    """Submit two nodes with two ranks each, and return the run once it trains."""
    size = ("resources.nodes=2", "resources.tasks_per_node=2")
    return project.submit(*words, *size, steps=1_000_000, every=5).wait_for_attempt(1)


def end(launch: Launch) -> None:
    launch.project.jobkit("cancel", "-y", "--no-grace", launch.run.name)
    launch.wait_until_over()


def measure_local(repeats: int) -> None:
    """A killed rank, here."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        launch = submit(Project(Path(folder, "project")), "--local", "--detach")
        times = [seconds_to_next_life(launch, partial(launch.kill_rank, 3)) for _ in range(repeats)]
        end(launch)
    show("a rank's death to all ranks' next life, here", times, 0.35)


def measure_slurm(repeats: int) -> None:
    """A killed rank on Slurm, then the loss of the node with it: a spare takes its place."""
    lost: list[float] = []
    deaths: list[float] = []
    with cluster_project(nodes=3) as (cluster, project):
        for number in range(max(1, repeats // 2)):
            launch = submit(project, "--cluster", "slurm", "resources.spares=1", "seed=" + str(number))
            for _ in range(2):
                deaths.append(seconds_to_next_life(launch, partial(launch.kill_rank, 3)))
            batch_node = launch.run.lease().node  # type: ignore[union-attr]
            node = next(name for name in launch.status.attempts[-1].nodes if name != batch_node)
            lost.append(seconds_to_next_life(launch, partial(cluster.kill_node, node)))
            end(launch)
            cluster.restart_node(node)
    show("a rank's death to all ranks' next life, on Slurm", deaths, 0.35)
    show("a node's loss to all ranks' next life, with a spare", lost, 1.5)


def measure_batch(repeats: int) -> None:
    """The loss of the node with the batch script: all its processes and its slurmd, which is back after 14 s.

    The first life that counts is the one of the requeued job, which waits 10 s in the queue (`cred_expire=5`).
    """
    lost: list[float] = []
    with cluster_project(nodes=4, cred_expire=5) as (cluster, project):
        launch = submit(project, "--cluster", "slurm")
        for _ in range(repeats):
            node = launch.run.lease().node  # type: ignore[union-attr]
            lost.append(seconds_to_next_life(launch, partial(lose_for_a_while, cluster, node)))
        end(launch)
    show("the batch node's loss to all ranks' next life", lost, None)


def lose_for_a_while(cluster: Cluster, node: str) -> None:
    """Kill a node; a thread starts its slurmd 14 s later."""
    cluster.kill_node(node)
    threading.Timer(14.0, cluster.restart_node, [node]).start()


MEASURES: dict[str, Callable[[int], None]] = {
    "submit": measure_submit,
    "help": measure_help,
    "local": measure_local,
    "slurm": measure_slurm,
    "batch": measure_batch,
}


def main() -> None:
    arguments = options(__doc__, 7, MEASURES).parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it jobkit would be compiled anew at each start
    for name in arguments.parts or MEASURES:
        MEASURES[name](arguments.repeats)


if __name__ == "__main__":
    main()
