"""The scripts in examples/ on a Slurm, side by side: preempted, then one rank of each killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.examples import BY_BOUNDARY, USUAL, Adopted, assert_as_before, weights_before
from harness.project import is_over, status, wait_for
from slurm_cluster import Cluster

HOLDS = {1: 5, 2: 5}
"""Checkpoints are due after 3, 6 and 9 steps; the second attempt begins at 5."""


def test_adopted_scripts_are_preempted_and_lose_a_rank_and_end_with_the_weights_of_before(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, slurm: Cluster
) -> None:
    examples = [example for example in [*USUAL, BY_BOUNDARY[0]] if example.is_installed]
    runs = [Adopted(tmp_path / example.name, example, HOLDS, slurm.env) for example in examples]
    for adopted in runs:
        adopted.submit("--cluster", "slurm")
    for adopted in runs:
        adopted.wait_until_held(1)
    whole = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", f"--chdir={slurm.dir}"]
    slurm.command("sbatch", *whole, "--wrap=sleep 1")
    for adopted in runs:
        adopted.kill_rank(2)
    for adopted in runs:
        wait_for("the end", lambda run=adopted.run: is_over(run), adopted.run)
    for adopted in runs:
        attempts = status(adopted.run)["attempts"]
        assert_as_before(
            adopted, weights_before(tmp_path_factory, adopted.example), ["preempted", "killed", "finished"]
        )
        assert attempts[1]["first_step"] == attempts[0]["last_step"] == 5, "the preemption repeats nothing"
        assert attempts[2]["first_step"] == adopted.example.kept, "a checkpoint every 3 steps"
