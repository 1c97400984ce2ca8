"""Which run directory a submission chooses among the versions of one config that --fresh has made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project

from jobkit.run.choose import find_run
from jobkit.run.config import Config
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir
from jobkit.run.runs import next_version, versions
from jobkit.submission.submit import choose_run

CONFIG = Config(name="toy", task="mytask:train")
NAME = run_name(CONFIG)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A runs directory with three versions of a run, and another run."""
    for name in (NAME, f"{NAME}-2", f"{NAME}-3", f"{NAME}-12345678", "other-00000000-7"):
        make(RunDir(tmp_path / name))
    return tmp_path


def make(run: RunDir) -> RunDir:
    run.path.mkdir()
    run.write_config(CONFIG)
    run.keep_number()
    return run


def chosen(runs: Path, fresh: bool = False) -> str:
    return choose_run(CONFIG, runs, fresh).name


def test_the_newest_version_is_continued_and_fresh_makes_the_next(runs: Path) -> None:
    assert (chosen(runs), chosen(runs, fresh=True)) == (f"{NAME}-3", f"{NAME}-4")
    assert [run.name for run in versions(runs, NAME)] == [NAME, f"{NAME}-2", f"{NAME}-3"]


@pytest.mark.parametrize("removed", ["", "-2"])
def test_one_that_was_removed_between_others_hides_none_of_them(runs: Path, removed: str) -> None:
    shutil.rmtree(runs / f"{NAME}{removed}")
    assert (chosen(runs), chosen(runs, fresh=True)) == (f"{NAME}-3", f"{NAME}-4")
    assert find_run("toy", runs).name == f"{NAME}-3"


def test_the_number_of_the_newest_is_not_given_again_when_it_was_removed(runs: Path) -> None:
    shutil.rmtree(runs / f"{NAME}-3")
    assert (chosen(runs), chosen(runs, fresh=True)) == (f"{NAME}-2", f"{NAME}-4")


def test_there_are_ten_and_more(runs: Path) -> None:
    make(RunDir(runs / f"{NAME}-10"))
    assert (chosen(runs), chosen(runs, fresh=True)) == (f"{NAME}-10", f"{NAME}-11")


def test_the_first_has_no_number_even_if_it_is_asked_for_as_fresh(tmp_path: Path) -> None:
    with RunDir(tmp_path / NAME).submission_lock():
        assert next_version(tmp_path, NAME).name == NAME
    assert (chosen(tmp_path / "none"), chosen(tmp_path / "none", fresh=True)) == (NAME, NAME)


def test_all_were_removed(runs: Path) -> None:
    for run in versions(runs, NAME):
        shutil.rmtree(run.path)
    assert (chosen(runs), chosen(runs, fresh=True)) == (NAME, f"{NAME}-4")


def test_a_folder_without_a_config_has_its_number(runs: Path) -> None:
    (runs / f"{NAME}-5").mkdir()
    assert (chosen(runs), chosen(runs, fresh=True)) == (f"{NAME}-3", f"{NAME}-6")


def test_a_runs_directory_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    project = Project(tmp_path)
    monkeypatch.setattr(Path, "iterdir", refuse)
    done = jobkit(project, "submit", "toy.yaml", "--local", expect=2)
    assert done.stderr == f"error: {tmp_path}/runs: Permission denied; set --runs-dir or JOBKIT_RUNS\n"
