"""A controller that is away for five minutes; tests/slurm/test_deaths_slurm.py has one that is away for seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from harness.processes import ranks_of
from harness.project import Project, causes, interrupt_when, is_over, wait_for, weights
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster

AWAY_SECONDS = 310


def test_a_run_is_requeued_when_its_controller_is_back_after_five_minutes(
    tmp_path: Path, short_dir: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    with Cluster(short_dir, nodes=1, **QUICK) as cluster:
        project = Project(tmp_path, cluster.env)
        ranks = ("resources.nodes=1", "resources.tasks_per_node=2", "params.sleep=0.1", "checkpoint.every=10")
        project.submit("--cluster", "slurm", *ranks, "retry.in_place=false", 'resources.time="0:20:00"')
        (run,) = project.runs

        def strike() -> None:
            cluster.stop_controller()
            for rank in ranks_of(run, 1).values():
                rank.send(signal.SIGKILL)

        interrupt_when(run, 1, 15, strike)
        time.sleep(AWAY_SECONDS)
        cluster.start_controller()
        wait_for("the end", lambda: is_over(run), run)
        assert causes(run) == ["killed", "finished"]
        assert weights(run) == uninterrupted(2)
