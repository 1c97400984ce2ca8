"""What is said to be typed to continue a run: it has to find that run again, wherever the run is by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobkit.run.continuation import how_to_continue
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status

SUBMIT = "python -m jobkit.submit toy.yaml params.lr=1"


@pytest.mark.parametrize(
    ("options", "runs", "added"),
    [
        ("", "runs", ""),
        (" --runs-dir mine", "mine", ""),
        ("", "elsewhere", " --runs-dir {there}"),  # JOBKIT_RUNS was set, or the runs were moved
        (" --runs-dir mine", "moved", " --runs-dir {there}"),
    ],
)
def test_the_runs_directory_is_named_where_the_command_would_look_elsewhere(
    tmp_path: Path, options: str, runs: str, added: str
) -> None:
    status = Status(command=f"{SUBMIT}{options}", cwd=str(tmp_path))
    kept = options if not added else ""
    said = how_to_continue(RunDir(tmp_path / runs / "toy-00000001"), status)
    assert said == f"{SUBMIT}{kept}{added.format(there=tmp_path / runs)}   (in {tmp_path})"


def test_a_folder_by_another_name_is_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    status = Status(command=SUBMIT, cwd=str(tmp_path / "home"))
    assert "--runs-dir" not in how_to_continue(RunDir(tmp_path / "disk" / "runs" / "toy-00000001"), status)


def test_a_command_without_its_secrets_follows_the_run_too(tmp_path: Path) -> None:
    before = "python -m jobkit resume toy-00000001 --runs-dir /old/runs"
    status = Status(command=f"{SUBMIT} params.token=***", resume=before, cwd=str(tmp_path))
    said = how_to_continue(RunDir(tmp_path / "runs" / "toy-00000001"), status)
    assert said == before.replace("/old/runs", str(tmp_path / "runs"))
