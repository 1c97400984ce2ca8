"""The commands on a login node import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.imports import HEAVY, heavy_in, imported_by
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
    assert heavy_in(imported_by(Project(tmp_path), *arguments)) == {name: set() for name in HEAVY}


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


SUPERVISOR = {"batch_script", "dependents", "notifier"}
"""What a submission to Slurm uses of the supervisor: the numbers in the batch script, and files that it writes."""


def test_a_submission_to_slurm_imports_nothing_heavy_and_no_supervisor(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    # The job is not to start: what it imports is its own affair.
    modules = imported_by(project, "submit", "toy.yaml", "--cluster", "slurm", "clusters.slurm.begin=now+1hour")
    (run,) = project.runs
    project.jobkit("cancel", run.name)
    assert heavy_in(modules) == {name: set() for name in HEAVY}
    assert {name.split(".")[2] for name in modules if name.startswith("jobkit.supervisor.")} == SUPERVISOR
