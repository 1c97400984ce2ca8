"""Stops on a real Slurm: preempted, out of time, cancelled; nothing is repeated after a graceful one."""

from __future__ import annotations

from collections.abc import Callable

from harness.runs import Project, wait_until
from slurmbox import Cluster

RESOURCES = ("--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2")


def test_preempted_then_out_of_time_then_cancelled(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """One run: a preemption with grace, jobkit preempt, the time limit of a minute, jobkit cancel, resume, scancel."""
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = on_slurm(cluster)
    launch = project.submit(*RESOURCES, "resources.time=0:01:00", steps=100_000)
    launch.wait_for_step(20)
    job = str(launch.status.job_id)

    cluster.preempt(job)
    launch.wait_for_attempt(2).wait_for_step(50)
    project.jobkit("preempt", launch.run.name)
    launch.wait_for_attempt(3)
    launch.wait_for_attempt(4)  # after the time limit of attempt 3
    assert launch.causes == ["preempted", "preempted", "timeout"]
    assert {ended.next for ended in launch.ends} == {"requeue"}
    record = cluster.job(job)
    assert (record["JobState"], record["Restarts"]) == ("RUNNING", "3"), "the same job, three times in the queue"

    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert (launch.status.state, launch.causes[3]) == ("cancelled", "cancelled")
    wait_until(lambda: not cluster.command("squeue", "-h"), "the job to leave the queue")
    assert cluster.job(job)["Restarts"] == "3"

    project.jobkit("resume", launch.run.name)
    launch.wait_for_attempt(5)
    assert launch.status.job_id != job
    cluster.command("scancel", str(launch.status.job_id))
    launch.wait_until_over()
    assert (launch.status.state, launch.causes[4]) == ("cancelled", "cancelled")
    wait_until(lambda: not cluster.command("squeue", "-h"), "the job to leave the queue")
    record = cluster.job(str(launch.status.job_id))
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0")
    launch.assert_repeated("none", "none", "none", "none")
    assert [ended.durable_step for ended in launch.ends[:-1]] == [ended.first_step for ended in launch.ends[1:]]


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
