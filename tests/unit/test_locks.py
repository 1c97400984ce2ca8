"""Locks: held by children too, released by death, shared by a group."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

from jobkit.run.locks import Lock


def test_a_lock_is_exclusive_and_says_so(tmp_path: Path) -> None:
    lock, other = Lock(tmp_path / "a" / "x"), Lock(tmp_path / "a" / "x")
    assert not lock.is_held()
    with lock:
        assert other.is_held()
    assert not other.is_held()


def test_a_child_that_inherited_a_lock_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "x")
    with lock:
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=lock.inheritable(), close_fds=True
        )
    assert Lock(tmp_path / "x").is_held()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not Lock(tmp_path / "x").is_held()


def test_a_group_that_shares_the_folder_shares_its_locks(tmp_path: Path) -> None:
    shared = tmp_path / "runs"
    shared.mkdir()
    shared.chmod(0o2775)
    with Lock(shared / ".locks" / "x"):
        pass
    assert (shared / ".locks").stat().st_mode & 0o7777 == 0o2775
    assert (shared / ".locks" / "x").stat().st_mode & 0o777 == 0o664


def test_two_may_look_at_a_lock_at_once(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with (tmp_path / "x").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not Lock(tmp_path / "x").is_held()
