"""Stops on a real Slurm: preempted, out of time, cancelled; nothing is repeated after a graceful one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.runs import Launch, Project, wait_until
from slurmbox import Cluster

RESOURCES = ("--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2")


def stop_in_all_ways(project: Project, cluster: Cluster) -> tuple[Launch, Any]:
    """A preemption with grace, jobkit preempt, the time limit of a minute, jobkit cancel, resume, scancel.

    Slurm's shortest limit is for attempt 3 alone: a busy machine needs more than it for the others.
    """
    launch = project.submit(*RESOURCES, "resources.time=1h", steps=100_000)
    launch.wait_for_step(20)
    job = str(launch.status.job_id)
    cluster.preempt(job)
    launch.wait_for_attempt(2).wait_for_step(50)
    project.jobkit("preempt", launch.run.name)
    cluster.limit_start(job, restarts=2, minutes=1)
    launch.wait_for_attempt(3)
    cluster.limit_start(job, restarts=3, minutes=60)
    launch.wait_for_attempt(4)  # after the time limit of attempt 3
    records = [cluster.job(job)]

    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    wait_until(lambda: not cluster.command("squeue", "-h"), "the job to leave the queue")
    project.jobkit("resume", launch.run.name)
    launch.wait_for_attempt(5)
    cluster.command("scancel", str(launch.status.job_id))
    launch.wait_until_over()
    wait_until(lambda: not cluster.command("squeue", "-h"), "the job to leave the queue")
    return launch, records + [cluster.job(job), cluster.job(str(launch.status.job_id))]


@pytest.fixture(scope="session")
def stopped(seen_once: Callable[..., tuple[Launch, Any]]) -> tuple[Launch, Any]:
    """The run, and Slurm's record of its jobs: of the first in its last start and at its end, and of the second."""
    return seen_once("stopped", stop_in_all_ways, nodes=2, cred_expire=5)


@pytest.mark.parametrize(
    ("attempt", "cause", "how"),
    [(1, "preempted", "requeue"), (2, "preempted", "requeue"), (3, "timeout", "requeue"), (4, "cancelled", "resume")],
    ids=["preemption", "jobkit preempt", "time limit", "cancel"],
)
def test_a_stop_repeats_no_step(stopped: tuple[Launch, Any], attempt: int, cause: str, how: str) -> None:
    launch, _ = stopped
    ended, following, done = launch.ends[attempt - 1], launch.ends[attempt], launch.steps_done
    assert (ended.cause, launch.status.attempts[attempt].began.how) == (cause, how)
    assert done[attempt][-1] + 1 == ended.durable_step == following.first_step == done[attempt + 1][0]
    assert [step for steps in done.values() for step in steps] == list(range(done[5][-1] + 1))


def test_all_starts_are_of_the_same_job_until_it_is_cancelled(stopped: tuple[Launch, Any]) -> None:
    launch, (running, over, _) = stopped
    assert (running["JobState"], running["Restarts"], over["Restarts"]) == ("RUNNING", "3", "3")
    assert over["ExitCode"] == "75:0"
    assert [attempt.began.job_id for attempt in launch.status.attempts[:4]] == [running["JobId"]] * 4


def test_scancel_is_final(stopped: tuple[Launch, Any]) -> None:
    launch, (_, _, record) = stopped
    assert (launch.status.state, launch.causes[4]) == ("cancelled", "cancelled")
    assert (record["JobState"], record["Restarts"], record["JobId"]) == ("CANCELLED", "0", launch.status.job_id)
    assert launch.run.durable_step() == launch.steps_done[5][-1] + 1, "the ranks saved"


def test_a_job_that_may_not_be_requeued_is_followed_by_another(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """An administrator has forbidden it, on a cluster where preemption cancels: the run goes on under another id."""
    cluster = make_slurm(nodes=2, cred_expire=5, preempt="cancel", requeue=False)
    project = on_slurm(cluster)
    launch = project.submit(*RESOURCES, steps=100_000)
    launch.wait_for_step(20)
    first_job = launch.status.job_id
    cluster.command("scontrol", "update", f"JobId={first_job}", "Requeue=0")
    cluster.preempt(first_job)  # type: ignore[arg-type]
    launch.wait_for_attempt(2)
    assert (launch.causes, launch.ends[0].next) == (["preempted"], "successor")
    second_job = str(launch.status.job_id)
    records = [cluster.job(str(job)) for job in (first_job, second_job)]
    assert [record["Restarts"] for record in records] == ["0", "0"]
    assert (second_job != first_job, records[1]["JobState"]) == (True, "RUNNING")
    assert (records[0]["ExitCode"], records[0]["PreemptTime"] != "None") == ("75:0", True)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    launch.assert_repeated("none")


WATCHES = """
import os, time
from jobkit.supervisor import requeue
watch = requeue._is_cancelled_since
def watch_longer(job_id):
    while not os.path.exists("acted"):
        time.sleep(0.05)
    return watch(job_id)
requeue._is_cancelled_since = watch_longer
"""
"""The second in which the supervisor watches the requeued job begins once the test has acted, within KillWait."""


@pytest.mark.parametrize("requeue", [True, False], ids=["requeue", "successor"])
def test_a_cancel_or_scancel_within_the_second_of_a_requeue_holds(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project], requeue: bool
) -> None:
    cluster = make_slurm(nodes=2, cred_expire=5, kill_wait=60)
    project = on_slurm(cluster)
    project.begin_with("jobkit.supervisor.main", WATCHES)
    for number, act in enumerate(("jobkit", "scancel") if requeue else ("jobkit",)):
        launch = project.submit(*RESOURCES, steps=100_000 + number).wait_for_step(20)
        job = str(launch.status.job_id)
        if not requeue:
            cluster.command("scontrol", "update", f"JobId={job}", "Requeue=0")
        (project.folder / "acted").unlink(missing_ok=True)
        cluster.command("scontrol", "update", "PartitionName=low", "State=DOWN")  # nothing starts before the cancel
        launch.run.ask("preempt", launch.status)
        wait_until(lambda launch=launch: launch.ends, "the end of the attempt")  # type: ignore[misc]
        if act == "scancel":
            cluster.command("scancel", job)
            (project.folder / "acted").touch()
        else:
            (project.folder / "acted").touch()
            said = project.jobkit("cancel", "-y", launch.run.name).stdout
            assert "cancelled at step" in said
        launch.wait_until(lambda me: me.status.state == "cancelled", "the run to be cancelled")
        wait_until(lambda: not cluster.command("squeue", "-h"), "an empty queue")
        assert launch.causes == ["preempted"]
        cluster.command("scontrol", "update", "PartitionName=low", "State=UP")
