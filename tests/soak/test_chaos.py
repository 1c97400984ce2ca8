"""Twenty random interruptions of one training run, on Slurm and here: it finishes, equal to the last bit.

    tools/test soak [--seeds 5]

The cluster has Slurm's own wait for credentials, 120 s, so that each needless requeue costs two minutes
(JOBKIT_SOAK_CRED_EXPIRE=5 is a quick look). Deaths of
ranks must be mended in place.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Launch, Project, is_alive, wait_until
from harness.training import YAML, points, result, training_project
from slurmbox import Cluster

from jobkit.run.view import view

INTERRUPTIONS = 20
RANKS = 4
STEPS = 2000
PATIENCE = 600.0
"""A requeue waits for two minutes by itself, and four ranks on two busy cores for each other."""

HARNESS = Path(__file__).parents[1] / "harness"

DEATHS_OF_RANKS = ("kill_rank", "kill_all_ranks")
KINDS = {
    "kill_rank": 6,
    "kill_all_ranks": 3,
    "kill_supervisor": 3,
    "kill_agent": 2,
    "kill_job_script": 1,
    "preempt": 2,
    "rehearsed": 2,
    "node_lost": 1,
}
"""Kinds of interruptions, and how common each is."""

KINDS_HERE = {
    **{kind: count for kind, count in KINDS.items() if kind not in ("preempt", "node_lost")},
    "kill_job_script": 2,
    "stop": 2,
}
"""The same without a scheduler. After the last two kinds a person types the same command."""


def interrupt(kind: str, launch: Launch, cluster: Cluster | None, chance: random.Random) -> None:
    """Carry out one interruption; the run's own files say what to strike."""
    rank = chance.randrange(RANKS)
    if kind == "kill_rank":
        launch.kill_rank(rank)
    elif kind == "kill_all_ranks":
        for pid in [launch.rank_pid(number) for number in range(RANKS)]:
            with contextlib.suppress(ProcessLookupError):  # it died of the death before
                os.kill(pid, signal.SIGKILL)
    elif kind in ("kill_supervisor", "kill_job_script"):
        # After another kill its successor may not have said yet who it is.
        wait_until(lambda: is_alive(launch.supervisor_pid), "a supervisor", PATIENCE)
        launch.kill_supervisor() if kind == "kill_supervisor" else launch.kill_job_script()
    elif kind == "kill_agent":
        launch.kill_agent(rank)
    elif kind == "preempt":
        assert cluster is not None
        cluster.preempt(str(launch.status.job_id))
    elif kind == "stop":
        launch.run.ask("stop", launch.status)  # as Ctrl-C does
    elif kind == "rehearsed":
        launch.project.jobkit("preempt", launch.run.name)
    elif kind == "node_lost":
        attempt = launch.status.attempt
        assert attempt is not None
        assert cluster is not None
        node = chance.choice(attempt.nodes)
        cluster.kill_node(node)
        time.sleep(5)
        cluster.restart_node(node)


def trains(launch: Launch) -> bool:
    """Return whether an attempt is past its beginning."""
    assert not launch.status.is_over
    return launch.status.open_attempt is not None and launch.step >= 0


SEEDS = range(int(os.environ.get("JOBKIT_SOAK_SEEDS", "5")))


def straight_result(folder: Path, ranks: int = RANKS, **params: Any) -> dict[str, Any]:
    """Return the result of the same run without interruptions."""
    straight = training_project(folder, ranks=ranks)
    uninterrupted = straight.submit("--local", "--detach", **{"steps": STEPS, "validate_every": 1000, **params})
    wait_until(lambda: uninterrupted.status.is_over, "the straight run", PATIENCE)
    return result(uninterrupted)


def finish(launch: Launch, expected: dict[str, Any], steps: int = STEPS) -> None:
    """Wait for the end of the run, and compare it with the straight one."""
    wait_until(lambda: launch.status.is_over, "the end of the run", PATIENCE)
    assert result(launch) == expected
    assert points(launch, "train/loss") == list(range(steps))
    assert all(ended.differs_at is None for ended in launch.ends)


@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_interruptions_change_no_bit(
    tmp_path: Path, make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project], seed: int
) -> None:
    expected = straight_result(tmp_path / "straight")
    cluster = make_slurm(nodes=3, cred_expire=int(os.environ.get("JOBKIT_SOAK_CRED_EXPIRE", "120")))
    project = on_slurm(cluster, YAML.format(task="train", ranks=2, every=100, memory=20), plain=False)
    shutil.copy(HARNESS / "training_task.py", project.folder)
    words = ("--cluster", "slurm", "resources.nodes=2", "resources.time=2:00:00", "retry.crash=unlimited")
    launch = project.submit(*words, steps=STEPS, validate_every=1000, step_seconds=0.02)
    for number, kind in interruptions(launch, seed, KINDS):
        before = len(launch.status.attempts)
        interrupt(kind, launch, cluster, random.Random(number))
        if kind != "kill_supervisor":
            wait_for_next(launch, before, f"{number} ({kind})")
        if kind in DEATHS_OF_RANKS:
            ended = launch.ends[before - 1]
            # Three deaths within an hour, or two without a newer snapshot, are the node's: the job gets another one.
            assert ended.next == "in_place" or "; from now on without " in ended.reason, ended
    finish(launch, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_interruptions_here_change_no_bit(tmp_path: Path, no_process_left: None, seed: int) -> None:
    expected = straight_result(tmp_path / "straight")
    project = training_project(tmp_path / "project", ranks=RANKS, every=100, memory=20)
    words, params = ("--local", "--detach", "retry.crash=unlimited"), {"steps": STEPS, "validate_every": 1000}
    launch = project.submit(*words, **params, step_seconds=0.02)
    for number, kind in interruptions(launch, seed, KINDS_HERE):
        before = len(launch.status.attempts)
        interrupt(kind, launch, None, random.Random(number))
        if kind in ("kill_job_script", "stop"):
            wait_until(lambda: view(launch.run).is_over, "the end of the job", PATIENCE)
            assert project.submit(*words, **params, step_seconds=0.02).run.path == launch.run.path
        if kind != "kill_supervisor":
            wait_for_next(launch, before, f"{number} ({kind})")
        if kind in DEATHS_OF_RANKS:
            assert launch.ends[before - 1].next == "in_place"
    finish(launch, expected)


def test_64_ranks_on_four_nodes_are_exact_through_each_kind_of_death(
    tmp_path: Path, make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    params = {"steps": 60, "batch": 256, "validate_every": 30}
    expected = straight_result(tmp_path / "straight", 64, **params)
    cluster = make_slurm(nodes=5, cred_expire=5)
    project = on_slurm(cluster, YAML.format(task="train", ranks=16, every=10, memory=5), plain=False)
    shutil.copy(HARNESS / "training_task.py", project.folder)
    launch = project.submit("--cluster", "slurm", "resources.nodes=4", "resources.time=2:00:00", **params)
    strikes = [
        lambda: launch.kill_rank(37),
        lambda: launch.kill_agent(50),
        launch.kill_supervisor,
        lambda: cluster.preempt(str(launch.status.job_id)),
        lambda: cluster.kill_node(launch.run.lease().node),  # type: ignore[union-attr] - with the batch script
    ]
    for number, strike in enumerate(strikes, 1):
        wait_until(lambda at=8 * number: trains(launch) and launch.step >= at, "steps", PATIENCE)  # type: ignore[misc]
        before = len(launch.status.attempts)
        strike()
        if strike != launch.kill_supervisor:
            wait_for_next(launch, before, str(number))
    finish(launch, expected, 60)


def interruptions(launch: Launch, seed: int, kinds: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Yield (number, kind) of each interruption, once the run has trained for some steps."""
    chance = random.Random(seed)
    plan = chance.choices(list(kinds), list(kinds.values()), k=INTERRUPTIONS)
    print(f"seed {seed}: {', '.join(plan)}")
    for number, kind in enumerate(plan, start=1):
        wait_until(lambda: trains(launch), "a training attempt", PATIENCE)
        aim = launch.step + chance.randrange(5, 60)
        wait_until(lambda aim=aim: trains(launch) and launch.step >= aim, "some steps", PATIENCE)  # type: ignore[misc]
        yield number, kind


def wait_for_next(launch: Launch, before: int, number: str) -> None:
    wait_until(
        lambda: len(launch.status.attempts) > before,
        f"the attempt after interruption {number}",
        PATIENCE,
    )
