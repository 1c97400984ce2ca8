"""Training on a real Slurm, stopped in all graceful ways: equal to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from harness.runs import Project, wait_until
from harness.training import YAML, points, result, training_project
from slurmbox import Cluster

RESOURCES = ("--cluster", "slurm", "resources.nodes=2")
HARNESS = Path(__file__).parents[1] / "harness"
STEPS = 330


def test_preempted_twice_out_of_time_and_scancelled_changes_no_bit(
    tmp_path: Path, make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    straight = training_project(tmp_path / "straight", ranks=2)
    before = straight.submit("--local", "--detach", "resources.nodes=2", steps=STEPS)
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = on_slurm(cluster, YAML.format(task="train", ranks=2, every="10min", memory="off"), plain=False)
    shutil.copy(HARNESS / "training_task.py", project.folder)
    expected = result(before)
    pauses = {"step_seconds": 0.3, "last_attempt": 5}
    launch = project.submit(*RESOURCES, "resources.time=1h", steps=STEPS, **pauses)
    for attempt in (1, 2):
        launch.wait_for_attempt(attempt).wait_for_step(launch.step + 20)
        cluster.preempt(str(launch.status.job_id))
        wait_until(lambda number=attempt: len(launch.ends) >= number, "the end of the attempt")  # type: ignore[misc]
    job = str(launch.status.job_id)
    # Slurm's shortest limit, for attempt 3 alone: a busy machine needs more than it for the others.
    cluster.limit_start(job, restarts=2, minutes=1)
    cluster.limit_start(job, restarts=3, minutes=60)
    launch.wait_for_attempt(4)
    assert launch.causes == ["preempted", "preempted", "timeout"]
    launch.wait_for_step(launch.step + 20)
    cluster.command("scancel", str(launch.status.job_id))
    launch.wait_until_over()
    assert launch.status.state == "cancelled"
    assert cluster.job(str(launch.status.job_id))["Restarts"] == "3"
    project.submit(*RESOURCES, steps=STEPS, **pauses)
    assert result(launch) == expected
    assert [attempt.began.how for attempt in launch.status.attempts] == ["start", *["requeue"] * 3, "resume"]
    assert points(launch, "train/loss") == list(range(STEPS))
    for ended, following in zip(launch.ends, launch.ends[1:], strict=False):
        assert following.first_step == ended.last_step  # nothing is repeated after a graceful stop
