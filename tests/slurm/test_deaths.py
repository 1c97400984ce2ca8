"""Deaths on a real Slurm, strung together: the job keeps its nodes, with Slurm's own credential wait of 120 s."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from harness.runs import Project, is_alive, wait_until
from slurmbox import Cluster

RESOURCES = ("--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2")


def test_deaths_of_ranks_supervisor_and_a_node_stay_in_the_job(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """Two nodes, and no spare. Requeued even once, the run would wait for two minutes."""
    cluster = make_slurm(nodes=3, slurmd_timeout=10)
    launch = on_slurm(cluster).submit(*RESOURCES, "resources.min_nodes=1", steps=100_000, every=5)
    launch.wait_for_step(15)
    job = str(launch.status.job_id)
    batch_node = cluster.job(job)["BatchHost"]
    first_nodes = launch.rank_nodes(4)
    assert first_nodes == [first_nodes[0]] * 2 + [first_nodes[2]] * 2 and first_nodes[0] != first_nodes[2]

    # A rank; then, with progress in between, a rank on the same node again: the node is kept.
    launch.kill_rank(3)
    launch.wait_for_attempt(2).wait_for_step(40).kill_rank(2)
    launch.wait_for_attempt(3).wait_for_step(60)
    assert launch.causes == ["killed", "killed"]
    assert [ended.rank for ended in launch.ends] == [3, 2]
    assert launch.status.excluded_nodes == []
    assert launch.rank_nodes(4) == first_nodes

    # The supervisor: no rank ends.
    ranks = [launch.rank_pid(rank) for rank in range(4)]
    before = launch.supervisor_pid
    launch.kill_supervisor()
    wait_until(lambda: launch.supervisor_pid != before, "the next supervisor")
    launch.wait_for_step(90)
    assert [launch.rank_pid(rank) for rank in range(4)] == ranks and all(is_alive(pid) for pid in ranks)

    # A slow slurmctld: a death is noticed, and mended, without it.
    cluster.pause_controller()
    launch.kill_rank(1)
    launch.wait_for_attempt(4).wait_for_step(120)
    cluster.resume_controller()

    # A node with ranks, not the batch script's: the run goes on without it.
    (lost,) = set(first_nodes) - {batch_node}
    cluster.kill_node(lost)
    launch.wait_for_attempt(5).wait_for_step(150)
    assert launch.ends[3].cause == "node_failure"
    assert launch.ends[3].node == lost
    assert launch.rank_nodes(2) == [batch_node] * 2

    # All ranks at once.
    for pid in [launch.rank_pid(rank) for rank in range(2)]:
        with contextlib.suppress(ProcessLookupError):  # the agent ends the others of an attempt
            os.kill(pid, signal.SIGKILL)
    launch.wait_for_attempt(6)
    wait_until(lambda: "down" in cluster.node_state(lost), "Slurm to notice the node")
    launch.wait_for_step(launch.step + 30)
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0"), "never in the queue"
    launch.project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert {ended.next for ended in launch.ends[:-1]} == {"in_place"}
    assert launch.causes == ["killed"] * 3 + ["node_failure", "killed", "cancelled"]
    launch.assert_repeated(*["since the checkpoint"] * 5)


def test_the_batch_node_is_lost_and_an_agent_on_another_node_requeues(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """All processes of the batch node and its slurmd are killed; once only the processes, as by an epilog."""
    cluster = make_slurm(nodes=4, cred_expire=5)
    launch = on_slurm(cluster).submit(*RESOURCES, steps=100_000, every=5)
    launch.wait_for_step(15)
    job = str(launch.status.job_id)
    cluster.kill_node_processes(cluster.job(job)["BatchHost"])
    launch.wait_for_attempt(2).wait_for_step(40)
    assert cluster.job(job)["Restarts"] == "1"

    node = cluster.job(job)["BatchHost"]
    cluster.kill_node(node)
    launch.wait_until(lambda me: me.status.state == "queued", "an agent to requeue the job")
    cluster.restart_node(node)  # else the job is completing, for slurmctld, until SlurmdTimeout
    launch.wait_for_attempt(3).wait_for_step(60)
    assert launch.status.job_id == job and int(cluster.job(job)["Restarts"]) >= 2  # Slurm itself may requeue it too
    launch.project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert launch.status.state == "cancelled"
    launch.assert_repeated(*["since the checkpoint"] * (len(launch.status.attempts) - 1))
