"""What tests/soak/sixty_four.py relies on; the run itself takes minutes and is not part of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sixty_four import verdict

from jobkit.run.files import write_json
from jobkit.run.rundir import RunDir
from jobkit.worker.metrics import MetricLog

ROOT = Path(__file__).parents[2]


def test_the_full_recipe_is_submitted_as_64_ranks(tmp_path: Path) -> None:
    (tmp_path / "train_blurred_64" / "box").mkdir(parents=True)
    environment = {**os.environ, "IMAGENET_DIR": str(tmp_path), "JOBKIT_CONFIG": str(tmp_path / "none.yaml")}
    command = [sys.executable, "-m", "jobkit.submit", "experiments/imagenet64.yaml", "--cluster", "slurm", "--dry-run"]
    command.append("params.fid_every=0")  # which needs packages
    done = subprocess.run(
        [*command, "--runs-dir", str(tmp_path / "runs")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "8 node(s) x 8 task(s) = 64 rank(s), 1 GPU(s) and 8 core(s) each" in done.stdout
    for option in ("--nodes=8", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=8"):
        assert f"#SBATCH {option}" in done.stdout


def finished(path: Path, *, second: int = 4, ranks: int = 4, points: tuple[int, ...] = tuple(range(10))) -> Path:
    """A run of 10 steps that was preempted at step 4 and went on at `second`, as its directory tells it."""
    run = RunDir(path / "run")
    run.checkpoints.mkdir(parents=True)
    run.tensorboard.mkdir()
    first: dict[str, Any] = {"attempt": 1, "time": 1.0}
    then: dict[str, Any] = {"attempt": 2, "time": 2.0}
    run.record("submitting", cluster="slurm", scheduler="slurm")
    run.record("started", job_id="7", **first)
    run.record("resumed", step=0, **first)
    run.record("interrupted", cause="preempted", step=4, **first)
    run.record("started", job_id="7", **then)
    run.record("resumed", step=second, checkpoint="step_00000004", **then)
    run.record("finished", step=10, **then)
    for attempt in (1, 2):
        for rank in range(ranks):
            log = run.rank_log(attempt, rank)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
    for step in (4, 10):
        folder = run.checkpoints / f"step_{step:08d}"
        folder.mkdir()
        write_json(folder / "manifest.json", {"step": step, "world_size": ranks})
    metrics = MetricLog(run.tensorboard, 0, lambda latest: None)
    for step in points:
        metrics.scalars(step, {"train/loss": 1.0})
    metrics.close()
    return run.path


def test_a_run_that_came_through_is_accepted(tmp_path: Path) -> None:
    assert verdict(finished(tmp_path), ranks=4, steps=10) == []


@pytest.mark.parametrize(
    ("told", "ranks", "steps", "words"),
    [
        ({"second": 3}, 4, 10, ["repeated"]),
        ({"second": 5}, 4, 10, ["left out"]),
        ({"ranks": 3}, 4, 10, ["attempt 1 had 3 ranks instead of 4", "step_00000010 was written by 3 ranks"]),
        ({"points": (0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9)}, 4, 10, ["TensorBoard"]),
        ({}, 4, 11, ["left out", "TensorBoard"]),
    ],
)
def test_a_run_that_did_not_is_not(
    tmp_path: Path, told: dict[str, Any], ranks: int, steps: int, words: list[str]
) -> None:
    problems = "; ".join(verdict(finished(tmp_path, **told), ranks=ranks, steps=steps))
    assert all(word in problems for word in words), problems
