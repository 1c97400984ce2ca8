"""Whether a run directory has been removed, and is not only away: of a file server that is away it would come back."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

from jobkit.run.rundir import BESIDE, RunDir

GONE_SECONDS = 10.0
"""For how long a run must be missing in its runs directory until it counts as removed: NFS may show a change late."""


class RunRemoved(FileNotFoundError):
    """Somebody has removed, or moved, the directory of a run that was under way."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(errno.ENOENT, f"{run.path} was removed, or moved, while the run was under way")


class Presence:
    """Looks again and again whether a run directory is there."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._folder: int | None = None
        """The run directory, open: it stays the same one whatever is made under its name."""
        self._missing_since: float | None = None

    def check(self) -> None:
        """Raise RunRemoved where it was removed; OSError where it may be away."""
        if self._is_certainly_gone():
            raise RunRemoved(self.run)
        if self.run.journal.path.exists():
            self._missing_since = None
            if self._folder is None:
                self._folder = os.open(self.run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if self._is_certainly_gone():  # some file systems count no links
                    self.close()
            return
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() - self._missing_since >= GONE_SECONDS and is_missing(self.run):
            raise RunRemoved(self.run)

    def _is_certainly_gone(self) -> bool:
        """Whether the directory that is open has no name any more; NFS does not tell."""
        try:
            return self._folder is not None and os.fstat(self._folder).st_nlink == 0
        except OSError:  # ESTALE for ever, of a disk that was mounted anew: what is under the name now says more
            self.close()
            return False

    def close(self) -> None:
        """Let go of the directory."""
        if self._folder is not None:
            with suppress(OSError):
                os.close(self._folder)
            self._folder = None


def is_missing(run: RunDir) -> bool:
    """Whether the runs directory can be read, and the run is not in it.

    A runs directory without the locks of its runs is another one: the place where a disk is mounted, and is not now.
    """
    try:
        if BESIDE not in os.listdir(run.path.parent):  # noqa: PTH208 - read again, as NFS needs it
            return False
        return not (run.journal.path.exists() or run.config_file.exists())
    except OSError:
        return False


def clear_up(run: RunDir) -> None:
    """Remove the empty folders that what was still writing has made in the place of a run that was removed."""
    with suppress(OSError):
        for folder, _, files in os.walk(run.path, topdown=False):
            if not files:
                with suppress(OSError):
                    os.rmdir(folder)  # noqa: PTH106
