"""Fewer nodes than asked for: a node that cannot start agents, a lost spare, a dead srun, and `min_nodes`."""

from __future__ import annotations

import signal
from collections.abc import Callable

from harness.runs import Project, is_alive, wait_until
from slurmbox import Cluster


def test_the_run_goes_on_with_the_nodes_that_are_left(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """Four nodes for two with ranks: they are lost one after the other, and the job is never requeued."""
    cluster = make_slurm(nodes=4, slurmd_timeout=3000)  # slurmctld asks its nodes each third of it, and once is enough
    nodes = set(cluster.settings.node_names)
    cluster.kill_node("node2")  # Slurm hears of it after SlurmdTimeout, and gives it to the job
    launch = on_slurm(cluster).submit(
        *("--cluster", "slurm", "resources.nodes=2", "resources.tasks_per_node=2"),
        *("resources.spares=2", "resources.min_nodes=1"),
        steps=100_000,
        every=5,
    )
    launch.wait_for_step(15)
    job = str(launch.status.job_id)
    batch_node, with_ranks = cluster.job(job)["BatchHost"], launch.rank_nodes(4)
    assert cluster.job(job)["NodeList"] == "node[1-4]", "Slurm gave it the dead node too"
    assert len(set(with_ranks)) == 2 and "node2" not in with_ranks
    assert launch.ends == [], "each node has an srun of its own, before an attempt is spent"
    (spare,) = nodes - {"node2", *with_ranks}

    # A spare that stands by is lost: no attempt ends.
    ranks = [launch.rank_pid(rank) for rank in range(4)]
    cluster.kill_node(spare)
    launch.wait_for_step(launch.step + 60)
    assert [launch.rank_pid(rank) for rank in range(4)] == ranks and all(is_alive(pid) for pid in ranks)

    # srun dies: the agents live on, or all die with their steps. No node is to blame.
    sruns = [process for process in cluster.job_processes() if process.name == "srun"]
    for process in sruns:
        process.send(signal.SIGKILL)
    wait_until(lambda: not any(process.alive for process in sruns), "srun to end")
    launch.wait_for_step(launch.step + 60)
    assert launch.rank_nodes(4) == with_ranks

    # A node with ranks is lost, and no spare is left.
    (lost,) = set(with_ranks) - {batch_node}
    cluster.kill_node(lost)
    launch.wait_until(lambda me: me.status.attempts[-1].nodes == [batch_node], "an attempt on one node")
    launch.wait_for_step(launch.step + 30)
    assert launch.rank_nodes(2) == [batch_node] * 2
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    assert (launch.ends[-1].cause, launch.ends[-1].node) == ("node_failure", lost)

    launch.project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert {ended.next for ended in launch.ends[:-1]} == {"in_place"}
    launch.assert_repeated(*["since the checkpoint"] * (len(launch.ends) - 1))
