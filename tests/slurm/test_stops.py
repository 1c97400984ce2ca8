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

    cluster.preempt(launch.status.job_id)  # type: ignore[arg-type]
    launch.wait_for_attempt(2).wait_for_step(50)
    assert (launch.causes, launch.ends[0].next) == (["preempted"], "requeue")
    assert launch.run.progress().first_step >= launch.ends[0].durable_step  # type: ignore[union-attr]

    project.jobkit("preempt", launch.run.name)
    launch.wait_for_attempt(3)
    assert launch.causes == ["preempted", "preempted"]

    launch.wait_for_attempt(4)  # after the time limit of attempt 3
    assert launch.causes[2] == "timeout"
    assert launch.run.progress().first_step >= launch.ends[2].durable_step  # type: ignore[union-attr]

    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert (launch.status.state, launch.causes[3]) == ("cancelled", "cancelled")
    wait_until(lambda: not cluster.command("squeue", "-h"), "the job to leave the queue")

    project.jobkit("resume", launch.run.name)
    launch.wait_for_attempt(5).wait_until(lambda me: me.step > 0, "a step")
    cluster.command("scancel", launch.status.job_id)  # type: ignore[arg-type]
    launch.wait_until_over()
    assert (launch.status.state, launch.causes[4]) == ("cancelled", "cancelled")
    for before, after in zip(launch.ends, launch.ends[1:], strict=False):
        assert after.first_step >= before.durable_step  # ranks may save on while the job is put back


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
    assert launch.status.job_id != first_job
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
