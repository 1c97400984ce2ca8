"""Agents on Slurm that call, and hang in an import: their node is to blame, and a spare or the queue helps."""

from __future__ import annotations

from collections.abc import Callable

from harness.runs import Project
from slurmbox import Cluster

LIMIT = "from jobkit.supervisor import starter; starter.READY_SECONDS = 15.0"

HANGS = """\
import os, time
if os.environ["SLURMD_NODENAME"] == "{node}":
    time.sleep(1e6)
"""


def test_a_node_whose_agent_hangs_is_to_blame(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=3, cred_expire=5)
    project = on_slurm(cluster)
    project.begin_with("jobkit.supervisor.main", LIMIT)
    project.write("hangs.py", HANGS.format(node="node2"))
    words = ("--cluster", "slurm", "preload=[hangs]")

    spared = project.submit(*words, "name=spared", "resources.nodes=2", "resources.spares=1", steps=5)
    spared.wait_until_over()
    assert (spared.causes, spared.status.attempts[0].nodes) == (["finished"], ["node1", "node3"])
    assert cluster.job(str(spared.status.job_id))["NodeList"] == "node[1-3]", "Slurm gave it node2"

    project.write("hangs.py", HANGS.format(node="node1"))
    queued = project.submit(*words, "name=queued", steps=5).wait_until_over()
    *given_up, finished = queued.status.attempts
    assert given_up and all((one.ended.cause, one.ended.node) == ("node_failure", "node1") for one in given_up)
    assert "it imports hangs" in str(given_up[0].ended.error)
    assert (finished.ended.cause, finished.nodes) == ("finished", [cluster.job(str(queued.status.job_id))["NodeList"]])
    assert int(cluster.job(str(queued.status.job_id))["Restarts"]) == len(given_up)
