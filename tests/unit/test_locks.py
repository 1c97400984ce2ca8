"""Locks end with their owner, on a file system that has them; on others jobkit refuses to start anything."""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project

from jobkit.errors import JobkitError
from jobkit.run import locks, sweeps
from jobkit.run.events import Event
from jobkit.run.locks import NoLocks, is_free, lock_at
from jobkit.run.rundir import RunDir
from jobkit.submission.checks import PROBLEM, check_runs_dir
from jobkit.train.prepared import prepare_folder


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_flock")
def test_a_file_system_without_locks_is_refused_with_its_type_and_what_to_type(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "x")
    for lock in (run.submission_lock, run.alive_lock, run.begin_lock):
        with pytest.raises(NoLocks, match=r"no locks on this file system \(\w+: .*--runs-dir or JOBKIT_RUNS"):
            lock()
    assert run.has_local_supervisor() is None, "nobody can know"
    assert check_runs_dir(tmp_path / "runs").state == PROBLEM
    with pytest.raises(NoLocks):
        prepare_folder(tmp_path / "data", lambda folder: pytest.fail("two would write it at once"))


@pytest.mark.usefixtures("no_flock")
def test_a_submission_there_starts_nothing_and_says_why_in_a_line(tmp_path: Path) -> None:
    project = Project(tmp_path)
    said = jobkit(project, "submit", "toy.yaml", "--local", expect=2).stderr
    assert said.startswith("error: ") and "no locks" in said and len(said.splitlines()) == 1
    assert project.runs == []


def test_another_error_of_the_disk_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="the disk"):
        lock_at(tmp_path / "lock", "")


def test_whether_a_lock_is_free_is_found_without_writing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    assert run.has_local_supervisor() is False and list(tmp_path.iterdir()) == []
    with run.alive_lock():
        assert run.has_local_supervisor() is True
    assert run.has_local_supervisor() is False
    assert is_free(tmp_path / ".locks" / "x.alive")


def test_who_waits_for_a_command_that_stands_still_is_told_which_and_goes_on_after_it(tmp_path: Path) -> None:
    project = Project(tmp_path)
    run = RunDir(tmp_path / "runs/toy-00000000")
    run.path.mkdir(parents=True)
    run.config_file.write_text("name: toy\n")
    run.record(Event.FINISHED)
    code = (
        "import os, signal, sys\nfrom jobkit.run.rundir import RunDir\n"
        "with RunDir(sys.argv[1]).submission_lock():\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)]) as stopped:
        os.waitpid(stopped.pid, os.WUNTRACED)
        command = project.start("cancel", "toy")
        assert command.stderr is not None
        said = command.stderr.readline()
        assert f"process {stopped.pid} on {socket.gethostname()}, of user {getpass.getuser()}, is at work on" in said
        assert run.name in said and command.poll() is None
        stopped.send_signal(signal.SIGCONT)
        printed, _ = command.communicate(timeout=60)
        assert command.returncode == 0 and "finished already" in printed
    with run.submission_lock():
        assert (tmp_path / "runs/.locks" / f"{run.name}.submit.holder").exists()
    assert not list((tmp_path / "runs/.locks").glob("*.holder"))


def test_a_command_for_a_run_does_not_wait_for_a_sweep_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the run's lock, for which that sweep may wait."""
    monkeypatch.setattr(locks, "TOLD_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(sweeps, "WAIT_SECONDS", 0.01)
    said = r"is still submitting a sweep in .*; try again later"
    with sweeps.submission_lock(tmp_path), pytest.raises(JobkitError, match=said):
        sweeps.wait_until_submitted(tmp_path)
    sweeps.wait_until_submitted(tmp_path)
