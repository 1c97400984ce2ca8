"""A run directory that was removed is told from one that is away: the first ends the job, the second is waited for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.supervisor import presence, slurm_job
from jobkit.supervisor.presence import Presence, RunRemoved, clear_up


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    made = RunDir(tmp_path / "mount/runs/toy-00000000")
    made.checkpoints.mkdir(parents=True)
    made.config_file.write_text("name: toy\n")
    made.record(Event.SUBMITTING, cluster="local", scheduler="local")
    made.keep_number()
    monkeypatch.setattr(presence, "GONE_SECONDS", 0.0)
    return made


def remove(run: RunDir) -> None:
    shutil.rmtree(run.path)


def remove_all(run: RunDir) -> None:
    shutil.rmtree(run.path.parent)


def remove_and_make_again(run: RunDir) -> None:
    shutil.rmtree(run.path)
    run.checkpoints.mkdir(parents=True)
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")


def move(run: RunDir) -> None:
    run.path.rename(run.path.with_name("elsewhere"))


@pytest.mark.parametrize("act", [remove, remove_all, remove_and_make_again, move])
def test_a_run_that_was_removed_or_moved_is_noticed(act: Callable[[RunDir], None], run: RunDir) -> None:
    seen = Presence(run)
    seen.check()
    act(run)
    with pytest.raises(RunRemoved, match=r"toy-00000000 was removed, or moved, while the run was under way"):
        seen.check()
    seen.close()


def unmounted(run: RunDir) -> None:
    mount = run.path.parent.parent
    mount.rename(mount.with_name("away"))
    mount.mkdir()


def unmounted_runs_directory(run: RunDir) -> None:
    runs = run.path.parent
    runs.rename(runs.with_name("away"))
    runs.mkdir()


def does_not_answer(run: RunDir) -> None:
    runs = run.path.parent
    runs.rename(runs.with_name("away"))
    runs.symlink_to(runs)  # whoever looks into it gets an error


@pytest.mark.parametrize("act", [unmounted, unmounted_runs_directory, does_not_answer])
def test_a_run_whose_disk_is_away_is_waited_for(act: Callable[[RunDir], None], run: RunDir) -> None:
    seen = Presence(run)
    seen.check()
    act(run)
    seen.check()
    seen.check()
    Presence(run).check()
    seen.close()


def test_a_directory_that_was_mounted_anew_is_looked_at_again(run: RunDir) -> None:
    seen = Presence(run)
    seen.check()
    assert seen._folder is not None
    os.close(seen._folder)  # an error for ever, as NFS's ESTALE
    seen.check()
    seen.check()
    remove(run)
    with pytest.raises(RunRemoved):
        seen.check()
    seen.close()


def test_a_run_must_be_missing_for_a_while(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "GONE_SECONDS", 3600.0)
    shutil.rmtree(run.path)
    seen = Presence(run)  # it has not seen the directory, as the next start of a job
    seen.check()
    monkeypatch.setattr(presence, "GONE_SECONDS", 0.0)
    with pytest.raises(RunRemoved):
        seen.check()


def test_a_job_does_not_wait_for_a_run_that_was_removed(run: RunDir) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(RunRemoved):
        slurm_job.retry_until_mounted(run, lambda: pytest.fail("there is nothing to do"))


def test_only_empty_folders_are_cleared_up(run: RunDir) -> None:
    remove(run)
    (run.checkpoints / ".staging").mkdir(parents=True)
    clear_up(run)
    assert not run.path.exists()
    run.checkpoints.mkdir(parents=True)
    (run.path / "kept").touch()
    clear_up(run)
    assert [path.name for path in run.path.iterdir()] == ["kept"]
