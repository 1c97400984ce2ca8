"""Locks between processes and hosts: flock(2), with the words a person needs while somebody else holds one.

Not filelock: its lock ends when the parent releases it, also for a child that inherited it, and where a file system has
no flock it falls back to a lock file that outlives its owner. Submission, devices and commands take them.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import time
from pathlib import Path
from types import TracebackType

from jobkit.disk import AWAY
from jobkit.errors import JobkitError
from jobkit.log import log

SILENT_SECONDS = 2.0
"""After so long a message names the lock."""

OWN = frozenset({"tmpfs", "overlay", "zfs", "ramfs", "rootfs"})
SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "gfs2", "ocfs2"})
"""Their locks reach all hosts, unless an option keeps them. Of BeeGFS, SMB and others a setting elsewhere decides."""

LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "localflock", "nobrl"})


class Lock:
    """A lock that the kernel releases when the last process that holds it has ended, or has closed it.

        with run.submit_lock() as lock:
            subprocess.run(["sbatch", ...], pass_fds=lock.inheritable())   # sbatch holds it too, if we are killed

    Not reentrant. Raises JobkitError where the file system has no locks.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor = -1

    def __enter__(self) -> Lock:
        self._descriptor, silent_until = self._open(), time.monotonic() + SILENT_SECONDS
        while not self._take(self._descriptor):
            if time.monotonic() > silent_until:
                log.info("waiting for another process that works on this run (%s)", self.file.name)
                silent_until = math.inf
            time.sleep(0.02)
        return self

    def take(self) -> bool:
        """Take the lock if it is free, and return whether it was; `close` lets go of it."""
        self._descriptor = self._open()
        if not self._take(self._descriptor):
            self.close()
        return self._descriptor >= 0

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock; a child that inherited it still holds it (an unlock would take it from the child too)."""
        os.close(self._descriptor)
        self._descriptor = -1

    def is_held(self) -> bool:
        """Return whether any process holds it. Nothing is waited for, and nothing is written."""
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not self._take(descriptor, fcntl.LOCK_SH)  # NFS grants a shared lock to a file open for reading
        finally:
            os.close(descriptor)

    def inheritable(self) -> list[int]:
        """Return the open files that a child must inherit (`pass_fds`) to hold the lock too."""
        return [self._descriptor]

    def leave_to_parent(self) -> None:
        """Let processes that are forked from here on hold no part of it: a loader's worker outlives a killed rank."""
        os.register_at_fork(after_in_child=lambda: os.close(self._descriptor) if self._descriptor >= 0 else None)

    def _open(self) -> int:
        make_folder(self.file.parent)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(descriptor).st_uid == os.geteuid():  # a group that shares the folder shares its locks
            os.fchmod(descriptor, 0o600 | self.file.parent.stat().st_mode & 0o066)
        return descriptor

    def _take(self, descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # ENOLCK, EOPNOTSUPP: nfs mounted with nolock, lustre without flock
            if error.errno in AWAY:
                raise
            raise JobkitError(
                f"{self.file.parent}: no locks on this file system ({error.strerror}): two processes could do the same "
                "work at once. Mount it with locks, or choose another folder with --runs-dir"
            ) from None
        return True


def file_system(mountinfo: str, path: Path) -> tuple[str, str]:
    """Return the type of a path's file system, and the hosts that see its locks: `all`, this `host` alone although
    others have the files, `own` where no other has them, or `unknown`.

    file_system(Path("/proc/self/mountinfo").read_text(), runs_dir)     # ("nfs4", "all")
    """
    kind, source, options, longest = "", "", set[str](), 0
    for line in mountinfo.splitlines():
        before_dash, _, after_dash = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before_dash.split()[4])
        if len(point) >= longest and path.is_relative_to(point):  # the last one is on top
            longest = len(point)
            kind, source, *rest = after_dash.split(" ")
            options = set(",".join([before_dash.split()[5], *rest]).split(","))
    if kind == "fuse.sshfs" or options & LOCAL_LOCKS:
        return kind, "host"
    if kind in SHARED:
        return kind, "all"
    return kind, "own" if source.startswith("/dev/") or kind in OWN else "unknown"


def make_folder(folder: Path) -> None:
    """Make a folder of the runs directory with that directory's own permissions, so that a group can share it."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    if folder.stat().st_uid == os.geteuid():  # else another user made it in this moment
        folder.chmod(folder.parent.stat().st_mode & 0o7777)
