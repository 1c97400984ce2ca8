"""What would run code when it is read is read only where the run's owner, or this user, has written it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness.other_user import NOBODY, only_root

from jobkit.run import compiler_cache
from jobkit.run.archive import pack
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.files import foreign_owner
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import NotRunnable, begin

pytestmark = only_root


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "x")
    run.submitit.mkdir(parents=True)
    run.write_config(Config(name="x", task="a:b"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.submitted_pickle.write_bytes(b"")
    return run


def test_whose_a_file_is(run: RunDir) -> None:
    assert foreign_owner(run.config_file, run.path) is None
    os.chown(run.config_file, NOBODY, NOBODY)
    assert foreign_owner(run.config_file, run.path) == "nobody"
    os.chown(run.config_file, 54321, NOBODY)
    assert foreign_owner(run.config_file, run.path) == "user 54321"
    os.chown(run.path, 54321, NOBODY)
    assert foreign_owner(run.config_file, run.path) is None


def test_the_pickle_of_a_job_is(run: RunDir) -> None:
    os.chown(run.submitted_pickle, NOBODY, NOBODY)
    with pytest.raises(NotRunnable, match=r"submitted.pkl is not the run's owner's, but nobody's; submit"):
        begin(run, job_id="1", scheduler="local")
    run.submitted_pickle.unlink()
    run.submitted_pickle.write_bytes(b"")
    assert begin(run, job_id="1", scheduler="local").number == 1


def test_what_was_compiled_is(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_text("code")
    archive = run.compiled_archive("v")
    archive.parent.mkdir()
    pack(tmp_path, ["kernel"], archive)
    os.chown(archive, NOBODY, NOBODY)
    folder = tmp_path / "node" / "folder"
    folder.parent.mkdir()
    compiler_cache._fill(folder, archive)
    assert not (folder / "kernel").exists()
    os.chown(archive, os.geteuid(), -1)
    compiler_cache._fill(folder, archive)
    assert (folder / "kernel").read_text() == "code"
