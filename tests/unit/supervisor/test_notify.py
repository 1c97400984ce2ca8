"""The command of --notify: who may read it, when it is called, and that it cannot hold anything up."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.dead_mount import dead_mount
from harness.journals import TOKEN, began, ended, make_run, submitted
from harness.runs import is_alive, wait_until

from jobkit.agent import processes
from jobkit.run.journal import Journal, read_status
from jobkit.run.rundir import RunDir
from jobkit.supervisor import notify


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted in `tmp_path`, and runs."""
    return make_run(tmp_path / "runs", "toy-11f5f19c", submitted(folder=str(tmp_path)), began())


def test_the_command_is_kept_for_its_owner_until_another_is_given(run: RunDir) -> None:
    notify.keep(run, "curl -H 'token: s3cret'")
    assert run.notify_file.stat().st_mode & 0o777 == 0o600
    notify.keep(run, None)
    assert "s3cret" in run.notify_file.read_text()
    notify.keep(run, "")
    notify.keep(run, "")
    assert not run.notify_file.exists()


def test_only_an_end_of_this_submission_since_then_is_told(run: RunDir, tmp_path: Path) -> None:
    notify.keep(run, "echo $JOBKIT_STATE at $JOBKIT_STEP: $JOBKIT_ERROR >>said; echo noise; exit 3")
    before = read_status(run)
    notify.tell(run, TOKEN, before)  # it runs
    Journal(run).append(ended("crashed", "fail", error='ValueError: "$(touch bad)"', last_step=7))
    notify.tell(run, "jobkit:another", before)
    notify.tell(run, TOKEN, read_status(run))
    assert not (tmp_path / "said").exists()
    notify.tell(run, TOKEN, before)
    assert (tmp_path / "said").read_text() == 'failed at 7: ValueError: "$(touch bad)"\n'
    assert run.notify_log.read_text() == "noise\n"
    assert run.notify_log.stat().st_mode & 0o777 == 0o600


def test_a_wait_of_ten_minutes_is_told_once(run: RunDir, tmp_path: Path) -> None:
    notify.keep(run, "echo $JOBKIT_STATE: $JOBKIT_TEXT >>said")
    said = tmp_path / "said"
    for number, waited in enumerate((300.0, 632.0, 900.0), 1):
        if number > 1:
            Journal(run).append(began(number, how="in place"))
        Journal(run).append(ended("crashed", "in_place", number, waited=waited, reason="crashed: S3 is away"))
        before = set(threading.enumerate())
        notify.tell_waiting(run)
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert said.read_text() == "running: toy-11f5f19c: no progress for 0:10:32: crashed: S3 is away\n"


def count_from(patch: pytest.MonkeyPatch, has_begun: Callable[[int], object]) -> None:
    """Let the command's time begin once its process has come so far: a shell may start later than that time ends."""
    wait = subprocess.Popen.wait

    def wait_later(process: subprocess.Popen[Any], timeout: float | None = None) -> int:
        wait_until(lambda: has_begun(process.pid), "the begin of the command")
        return wait(process, timeout)

    patch.setattr(subprocess.Popen, "wait", wait_later)


def test_a_command_that_hangs_is_killed_with_its_children(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "SECONDS", 0.5)
    file = tmp_path / "child"
    notify.keep(run, f"sleep 1000 & echo $! >{file}.new; mv {file}.new {file}; wait")
    before = read_status(run)
    Journal(run).append(ended("stopped", "stop"))
    count_from(monkeypatch, lambda pid: file.exists())
    notify.tell(run, TOKEN, before)
    child = int(file.read_text())
    wait_until(lambda: not is_alive(child), "the end of the child")


def test_a_command_that_cannot_be_killed_holds_nothing_up(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SECONDS", 1.0)
    before = read_status(run)
    Journal(run).append(ended("stopped", "stop"))
    with dead_mount() as folder:
        notify.keep(run, f"exec cat {folder}/file")
        telling = threading.Thread(target=notify.tell, args=(run, TOKEN, before), daemon=True)
        with monkeypatch.context() as patch:
            count_from(patch, lambda pid: processes.name_of(pid) == "cat")
            telling.start()
            wait_until(lambda: not telling.is_alive(), "the end of the call")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_command_of_another_user_is_not_executed(run: RunDir, tmp_path: Path) -> None:
    notify.keep(run, "touch said")
    os.chown(run.notify_file, 65534, 65534)
    before = read_status(run)
    Journal(run).append(ended("stopped", "stop"))
    notify.tell(run, TOKEN, before)
    assert not (tmp_path / "said").exists()
