"""Pauses between two attempts on a real Slurm: agents that are about to be killed write down what they alone hold."""

from __future__ import annotations

from collections.abc import Callable

from harness.pauses import SHORT, YAML, fail_at, failing_project, wait_for_pause
from harness.runs import Project, wait_until
from slurmbox import Cluster

SUBMIT = ("submit", "exp.yaml", "--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2")


def test_a_preemption_and_a_scancel_in_a_pause_lose_no_step_that_a_snapshot_held(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = failing_project(on_slurm(cluster, YAML, plain=False))
    fail_at(project, step=20, pause=SHORT)
    project.jobkit(*SUBMIT)
    launch = project.only_run()
    wait_for_pause(launch, 2)
    assert launch.run.durable_steps() == [], "it is in memory alone"
    job = str(launch.status.job_id)
    cluster.preempt(job)
    wait_until(lambda: len(launch.ends) == 3, "the end of the job's first start")
    assert launch.causes[2] == "preempted"
    assert launch.run.durable_steps() == [20]

    fail_at(project, step=40)
    wait_for_pause(launch, 5)
    assert launch.run.durable_steps() == [20]
    batch_node = cluster.job(job)["BatchHost"]
    (lost,) = {"node1", "node2"} - {batch_node}  # the other one has copies of its snapshots
    cluster.kill_node(lost)
    cluster.command("scancel", job)
    launch.wait_until_over()
    assert launch.run.durable_steps() == [20, 40]
    assert (launch.status.state, cluster.job(job)["Restarts"]) == ("cancelled", "1")
    cluster.restart_node(lost)

    fail_at(project, step=-1)
    project.jobkit(*SUBMIT)
    launch.wait_until(lambda me: me.status.state == "finished", "the end of the run")
    assert [steps[0] for steps in launch.steps_done.values()] == [0, 20, 40]
    assert [step for steps in launch.steps_done.values() for step in steps] == list(range(90)), "none is repeated"
    assert launch.status.result == {"sum": sum(range(90))}
