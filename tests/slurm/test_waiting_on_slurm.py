"""Waiting for a run on Slurm, following it, and being told of it, through a preemption."""

from __future__ import annotations

import json
from pathlib import Path

from harness.project import Project, causes, describe, status, step, wait_for
from slurm_cluster import Cluster

from jobkit.run.yamlfile import dump


def test_a_run_is_waited_for_and_told_of_through_a_preemption(tmp_path: Path, slurm: Cluster) -> None:
    project, told = Project(tmp_path, slurm.env), tmp_path / "told"
    command = f'echo "$JOBKIT_EVENT|$JOBKIT_TEXT" >> {told}'
    (tmp_path / "own.yaml").write_text(dump({"notify": {"command": command, "preempted": 0}}))
    project.env["JOBKIT_CONFIG"] = str(tmp_path / "own.yaml")
    project.slow_down(attempts=1)
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "params.steps=30")
    submitted = json.loads(project.submit("--cluster", "slurm", *small, "--json").stdout)
    run = Path(submitted["path"])
    assert submitted["state"] == "queued" and submitted["job_id"] == status(run)["job_id"]
    waiting = project.start("wait", run.name, "--timeout", "10min")
    following = project.start("logs", "-f", run.name)
    wait_for("some steps", lambda: step(run) >= 2, run)
    project.jobkit("preempt", run.name)
    printed, _ = waiting.communicate(timeout=300)
    assert (waiting.returncode, printed) == (0, f"{run.name}: finished at step 30/30\n"), describe(run)
    _, attempts = following.communicate(timeout=120)
    assert following.returncode == 0
    assert [f"--- attempt {number}, rank 0" in attempts for number in (1, 2)] == [True, True]
    assert causes(run) == ["preempted", "finished"]
    lines = told.read_text().splitlines()
    assert lines[0].startswith(f"preempted|{run.name}: preempted 1 time(s), goes on at step ")
    assert lines[1:] == [f"finished|{run.name}: finished at step 30/30"]
