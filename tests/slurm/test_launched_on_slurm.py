"""`srun python -m jobkit.worker EXP.yaml`: a YAML's run in an allocation of one's own, and under mpirun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, assert_each_step_once, causes, describe, status, step, wait_for, weights
from slurm_cluster import Cluster

HOLDS = """
import os, time

from jobkit.worker.stop import STOP_SIGNALS

first = []


def at_step(ctx, step):
    first.append(step)
    while os.environ.get("HOLD") and step >= first[0] + 6 and not STOP_SIGNALS.pending:
        time.sleep(0.02)
    if os.environ.get("HOLD"):
        time.sleep(0.1)  # ranks agree a few times a second: not after all the steps that are left
"""
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", sys.executable, "-m", "jobkit.worker")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "jobkit.worker")
WITH_INIT = "import jobkit\nimport mytask\n\nctx = jobkit.init()\nctx.finish(mytask.train(ctx))\n"
KINDS = {"task": (), "command": ("task=''", "command=[python, with_init.py]")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_from_srun_to_mpirun_and_on_to_a_job(tmp_path: Path, slurm: Cluster, kind: str) -> None:
    project = Project(tmp_path / "project", dict(slurm.env))
    (project.path / "orders.py").write_text(HOLDS)
    (project.path / "with_init.py").write_text(WITH_INIT)
    words = ("toy.yaml", "resources.tasks_per_node=1", "resources.time='0:10:00'", *KINDS[kind])
    for place, launcher in enumerate((SRUN, MPIRUN)):
        before = status(project.runs[0])["step"] if project.runs else 0
        process = subprocess.Popen(
            [*launcher, *words],
            cwd=project.path,
            env=project.env | {"HOLD": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        wait_for("a run", lambda: process.poll() is not None or project.runs)  # noqa: B023
        assert process.poll() is None, process.communicate()
        (run,) = project.runs
        wait_for("some steps", lambda: process.poll() is not None or step(run) >= before + 5, run)  # noqa: B023
        process.send_signal(signal.SIGUSR2)
        said = process.communicate(timeout=600)[0]
        assert process.returncode not in (0, None), said
        assert status(run)["state"] == "interrupted" and causes(run) == ["user"] * (place + 1), said + describe(run)
    project.jobkit("submit", *words, "--cluster", "slurm", "--follow", timeout=600)
    assert project.runs == [run] and causes(run) == ["user", "user", "finished"], describe(run)
    assert_each_step_once(run, 60, ranks=2)
    subprocess.run([*SRUN, *words, "--fresh"], cwd=project.path, env=project.env, check=True)
    assert weights(project.runs[-1]) == weights(run)
