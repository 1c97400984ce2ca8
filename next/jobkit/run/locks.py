"""Locks between processes and hosts: flock by way of filelock, with the words a person needs while one is held."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from jobkit.errors import JobkitError
from jobkit.log import log

SILENT_SECONDS = 2.0
"""After this long a person is told what is waited for."""


class Lock:
    """A lock file that the kernel releases however its holder ends.

        with run.submit_lock() as lock:
            subprocess.run(["sbatch", ...], pass_fds=lock.inheritable())   # sbatch holds it too, if we are killed

    Not reentrant. Raises JobkitError where the file system has no locks: a lock file that outlives its owner is none.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        # filelock would fall back to a SoftFileLock, which outlives its owner.
        self._lock = FileLock(file, mode=0o664, fallback_to_soft=False)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release(force=True)

    def acquire(self, seconds: float = -1.0) -> bool:
        """Wait for the lock, at most `seconds` (-1: for ever); return whether it is held."""
        make_folder(self.file.parent)
        begin = time.monotonic()
        try:
            try:
                self._lock.acquire(timeout=SILENT_SECONDS if seconds < 0 else seconds, poll_interval=0.02)
            except Timeout:
                if seconds >= 0:
                    return False
                log.info("waiting for another process that works on this run (%s)", self.file.name)
                self._lock.acquire(timeout=-1, poll_interval=0.1)
        except (OSError, NotImplementedError) as error:
            waited = time.monotonic() - begin
            raise JobkitError(f"{self.file}: cannot be locked after {waited:.0f} s: {error}; use --runs-dir") from error
        return True

    def is_held(self) -> bool:
        """Return whether some process holds it. Nothing is waited for."""
        if not self.file.exists():
            return False
        probe = FileLock(self.file, mode=0o664, fallback_to_soft=False)
        try:
            probe.acquire(timeout=0)
        except Timeout:
            return True
        probe.release()
        return False

    def inheritable(self) -> list[int]:
        """Return the open files that a child must inherit to hold the lock too."""
        descriptor = self._lock._context.lock_file_fd
        return [] if descriptor is None else [descriptor]


def make_folder(folder: Path) -> None:
    """Make a folder of the runs directory with that directory's own permissions, so that a group can share it."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    try:
        os.chmod(folder, folder.parent.stat().st_mode & 0o7777)
    except PermissionError:  # another user made it in this moment
        return
