"""Locks on files, which end with the process that holds them, however it ends; and whether one is held."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from jobkit.errors import InputError, JobkitError
from jobkit.log import log
from jobkit.run.files import FOR_ALL, is_there, write_atomic

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock says where a file system has no locks, or its mount none on this host."""


TOLD_AFTER_SECONDS = 2.0
"""How long a command waits for another one without a word: most hold a lock for less."""


class NoLocks(InputError):
    """The file system has no locks."""


def lock_at(file: Path, elsewhere: str) -> FileLock:
    """The lock of a file, not held yet; its folder is made. Raises OSError, and NoLocks with what to do.

    filelock would take the mere existence of the file for a lock instead, which outlives its owner. `elsewhere`: what
    to set so that the file lies on another file system.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, FOR_ALL))
    try:
        is_free(file)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocks(
            f"{file.parent}: no locks on this file system ({file_system(file)}: {error.strerror}): two processes could "
            f"do the same work at once. Mount it with them (nfs: without nolock; lustre: with flock), or {elsewhere}"
        ) from None
    return FileLock(file)


@contextlib.contextmanager
def held(lock: FileLock, what: str, seconds: float | None = None) -> Iterator[FileLock]:
    """Hold a lock; who waits for it is told by whom it is held, who may stand still. `what` is what that one does.

    Raises JobkitError after a wait of `seconds`, where they are given.
    """
    file = Path(lock.lock_file)
    try:
        lock.acquire(timeout=TOLD_AFTER_SECONDS)
    except Timeout:
        log.warning("%s is %s, and is waited for; Ctrl-C ends that", _who_holds(file), what)
        try:
            lock.acquire(timeout=-1 if seconds is None else seconds)
        except Timeout:
            raise JobkitError(f"{_who_holds(file)} is still {what} after {seconds:g} s; try again later") from None
    try:
        with contextlib.suppress(OSError):  # beside the lock, which whoever tries to get it empties
            write_atomic(_name_file(file), f"process {os.getpid()} on {socket.gethostname()}", durable=False)
        yield lock
    finally:
        with contextlib.suppress(OSError):
            _name_file(file).unlink()
        lock.release()


def _name_file(lock: Path) -> Path:
    return lock.with_name(f"{lock.name}.holder")


def _who_holds(lock: Path) -> str:
    try:
        who = _name_file(lock).read_text(encoding="utf-8", errors="replace")
        with contextlib.suppress(KeyError):  # a user that this machine does not know
            who += f", of user {_name_file(lock).owner()},"
    except OSError:
        return "a process that has not left its name"
    return who


def held_by_children(lock: FileLock) -> list[int]:
    """The files that a child process gets (`pass_fds`) so that a lock which is held lasts as long as the child does.

    It still ends with its release: only where this process is killed before that is it left to the child.
    """
    file = lock._context.lock_file_fd
    return [] if file is None else [file]


def is_free(file: Path) -> bool:
    """Whether nobody holds a lock. Nothing is written, and who may only read the file can ask, too. Raises OSError."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS grants this one to a file that is open for reading
    except BlockingIOError:
        return False
    finally:
        os.close(opened)
    return True


def is_held(lock: Path) -> bool | None:
    """Whether a lock is held; None where it may not be read, or its file system has none."""
    try:
        return is_there(lock) and not is_free(lock)
    except OSError:
        return None


def file_system(path: Path) -> str:
    """The type of the file system that a path is on, as in `ext4` or `nfs4`."""
    best = ("", "unknown")
    with contextlib.suppress(OSError):  # not Linux
        for line in os.fsdecode(Path("/proc/mounts").read_bytes()).splitlines():
            point, kind = line.split()[1:3]
            if path.resolve().is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]
