"""A run that loses one node and then the one of its batch script, without spares.

tests/slurm/test_deaths_slurm.py and test_in_place.py have each alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.project import Project, causes, describe, interrupt_when, is_over, status, wait_for, weights
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster


def test_two_lost_nodes_are_named_and_the_run_goes_on_elsewhere(
    tmp_path: Path, short_dir: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    with Cluster(short_dir, **QUICK | {"slurmd_timeout": 10}) as cluster:
        project = Project(tmp_path, cluster.env)
        two = ("resources.nodes=2", "resources.tasks_per_node=1", "params.sleep=0.1", "checkpoint.every=10")
        project.submit("--cluster", "slurm", *two)
        (run,) = project.runs
        lost = []

        def lose(with_batch_script: bool) -> None:
            nodes = status(run)["attempts"][-1]["nodes"]
            host = cluster.job(status(run)["job_id"])["BatchHost"]
            (node,) = (one for one in nodes if (one == host) == with_batch_script)
            cluster.kill_node(node)
            lost.append(node)

        interrupt_when(run, 1, 10, lambda: lose(with_batch_script=False))
        interrupt_when(run, 2, 20, lambda: lose(with_batch_script=True))
        wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["node_failure", "node_failure", "finished"]
    assert [one["failure"]["node"] for one in status(run)["attempts"][:2]] == lost, describe(run)
    assert weights(run) == uninterrupted(2)
