"""The commands on a login node import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.imports import HEAVY, imported_by
from harness.project import Project
from slurm_cluster import Cluster


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "toy.yaml", "--dry-run", "--local"],
        ["submit", "toy.yaml", "--dry-run", "--cluster", "slurm"],
        ["list"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_a_command_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    assert imported_by(Project(tmp_path), *arguments) == {name: set() for name in HEAVY}


WITHOUT = """
import sys
from jobkit import submit
try:
    submit.main(["--help"])
except SystemExit:
    print(sorted({"yaml", "omegaconf", "filelock", "submitit"} & set(sys.modules)), file=sys.stderr)
"""


def test_the_help_of_submit_imports_nothing_that_only_a_submission_needs() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "--sweep" in done.stdout
    assert done.stderr == "[]\n"


def test_a_submission_to_slurm_imports_nothing_heavy(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    # The job is not to start: what it imports is its own affair.
    heavy = imported_by(project, "submit", "toy.yaml", "--cluster", "slurm", "clusters.slurm.begin=now+1hour")
    (run,) = project.runs
    project.jobkit("cancel", run.name)
    assert heavy == {name: set() for name in HEAVY}
