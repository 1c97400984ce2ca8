"""The lease of the run directory, as a rank sees it: an attempt that has lost it writes nothing more, and ends.

A node that was cut off, or a process that was stopped, comes back when another attempt owns the run already.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from jobkit.errors import EXIT_RESUMABLE
from jobkit.log import log
from jobkit.run.rundir import RunDir


class LostLease(BaseException):
    """Another attempt owns the run. Not an Exception: a training function's `except Exception` must not go on."""


def holds_lease(run: RunDir, attempt: int) -> bool:
    """Whether an attempt may write; not where the lease cannot be read."""
    return run.owner() == attempt


def check_lease(run: RunDir, attempt: int) -> None:
    """Raise LostLease where another attempt owns the run, OSError where the lease cannot be read."""
    owner = run.owner()
    if owner is None:
        raise OSError(errno.EIO, "cannot be read", str(run.lease_file))
    if owner != attempt:
        raise LostLease(f"attempt {owner} has taken {run.name} over; attempt {attempt} ends and writes nothing more")


def end_after_lost_lease(error: LostLease) -> NoReturn:
    """End this process at once, from whichever thread: its training thread may wait for ranks that are gone.

    For entry points alone.
    """
    try:
        log.warning("%s", error)
        sys.stdout.flush()
    finally:  # the reader of a pipe may be gone, or the disk full: it ends all the same
        os._exit(EXIT_RESUMABLE)
