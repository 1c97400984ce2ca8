"""A run that meets its time limit several times in a row; tests/slurm/test_resume.py has one that meets it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.project import Project, assert_each_step_once, causes, is_over, wait_for, weights
from harness.reference import STEPS
from slurm_cluster import Cluster


def test_timed_out_twice_on_slurm(slurm: Cluster, tmp_path: Path, uninterrupted: Callable[[int], bytes]) -> None:
    project = Project(tmp_path, slurm.env)
    # One minute is Slurm's shortest limit; its --signal comes at once then, a minute early, and must not stop the run.
    project.submit("--cluster", "slurm", "resources.time=0:01:00", "params.sleep=1.6")
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run, seconds=400)
    assert causes(run)[-1] == "finished"
    assert causes(run).count("timeout") >= 2
    assert set(causes(run)[:-1]) == {"timeout"}
    assert weights(run) == uninterrupted(4)
    assert_each_step_once(run, STEPS)
