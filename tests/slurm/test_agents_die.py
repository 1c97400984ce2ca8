"""Signals and deaths of agents on a real Slurm: the ranks start again on the same nodes, in the same job."""

from __future__ import annotations

from collections.abc import Callable

from harness.runs import Project, wait_until
from slurmbox import Cluster

RESOURCES = ("--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2")


def test_agents_die_and_no_node_is_to_blame(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """A SIGTERM that nobody explains, an agent, all steps, and more supervisors than may fail to begin in a row."""
    cluster = make_slurm(nodes=2)
    launch = on_slurm(cluster).submit(*RESOURCES, steps=100_000, every=5)
    launch.wait_for_step(20)
    job = launch.status.job_id

    cluster.command("scancel", "--signal=TERM", f"{job}.0")
    launch.wait_for_attempt(2).wait_for_step(launch.step + 20).kill_agent(2)
    launch.wait_for_attempt(3).wait_for_step(launch.step + 20)
    steps = cluster.command("squeue", "--noheader", "--steps", "--format=%i").split()
    cluster.command("scancel", *(step for step in steps if not step.endswith("batch")))
    launch.wait_for_attempt(4).wait_for_step(launch.step + 20)
    for _ in range(4):
        before = launch.supervisor_pid
        launch.kill_supervisor()
        wait_until(lambda before=before: launch.supervisor_pid != before, "the next supervisor")
        launch.wait_until(lambda me: not me.run.failed_starts.exists(), "its agents to call: it has begun something")
        launch.wait_for_step(launch.step + 20)
    launch.kill_agent(2)  # the srun of the next one is beside a step of another supervisor
    launch.wait_for_attempt(5).wait_for_step(launch.step + 20)

    launch.project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert launch.causes == ["unknown", "killed", "killed", "killed", "cancelled"]
    assert {ended.next for ended in launch.ends[:-1]} == {"in_place"}
    assert {tuple(attempt.nodes) for attempt in launch.status.attempts} == {("node1", "node2")}
    assert (launch.status.job_id, cluster.job(str(job))["Restarts"]) == (job, "0")
    launch.assert_repeated("none", *["since the checkpoint"] * 3)


def test_the_job_is_requeued_before_a_save_ends_that_takes_as_long_as_slurm_waits(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """PreemptMode=CANCEL without grace: Slurm ends all processes KillWait later, the supervisor too."""
    cluster = make_slurm(nodes=2, cred_expire=5, grace=0, kill_wait=30, preempt="cancel")
    launch = on_slurm(cluster).submit(*RESOURCES, steps=100_000, every=1000, save_waits=True)
    launch.wait_for_step(20)
    cluster.preempt(str(launch.status.job_id))
    launch.wait_until(lambda me: me.ends, "the end of the attempt").end_save().wait_for_attempt(2)
    assert (launch.causes, launch.ends[0].next, launch.ends[0].durable_step) == (["preempted"], "requeue", None)
    launch.assert_repeated("none")
    launch.project.jobkit("cancel", "-y", "--no-grace", launch.run.name)
    launch.wait_until_over()
