"""A day with many runs on this machine, as docs/many-runs.md tells it."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from harness.console import type_block, write_files
from harness.project import Project, status, wait_for


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """On a machine of its own with two CPU slots."""
    machine = {"JOBKIT_CPU_SLOTS": "2", "JOBKIT_DEVICES_DIR": str(tmp_path / "devices")}
    made = Project(tmp_path / "project", machine)
    write_files(made)
    return made


def test_the_day_of_the_docs(project: Project) -> None:
    type_block(project, "--sweep params.lr=.003,.01,.03,.3 seed=0,1,2 --max-running 4\nsweep digits/s1: 12 runs (12")
    type_block(project, "--from digits-0a8be2a1@30")


def let_go(project: Project) -> None:
    """Let the runs end when all of them are there and two wait."""
    wait_for("three runs", lambda: sum(bool(status(run).get("waiting")) for run in project.runs) == 2)
    (project.path / "go").touch()


def test_three_runs_take_turns_on_one_gpu(project: Project) -> None:
    project.env["CUDA_VISIBLE_DEVICES"] = "0"  # there need not be one
    script = project.path / "gpu.py"
    script.write_text(
        script.read_text().replace(
            "time.sleep(60)", f"while not os.path.exists({str(project.path / 'go')!r}): time.sleep(0.1)"
        )
    )
    Thread(target=let_go, args=[project], daemon=True).start()
    type_block(project, "submit gpu.yaml --local --detach\nprocess")
