"""The lease of the run directory, as a rank sees it: an attempt that lost it writes nothing more, and ends.

A node that was cut off, or a process that was stopped, comes back when another attempt owns the run already.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from jobkit.errors import EXIT_RESUMABLE, LostLease
from jobkit.log import log
from jobkit.run.rundir import RunDir


def check_lease(run: RunDir, attempt: int) -> None:
    """Raise LostLease if another attempt owns the run, OSError if the lease cannot be read."""
    lease = run.lease()
    if lease is None:
        raise FileNotFoundError(errno.ENOENT, "is gone", str(run.lease_file))
    if lease.attempt != attempt:
        raise LostLease(f"attempt {lease.attempt} has taken {run.name} over; attempt {attempt} writes nothing more")


def end_after_lost_lease(error: LostLease) -> NoReturn:
    """End this process at once, from any thread: the main thread may wait for ranks that are gone."""
    try:
        log.warning("%s", error)
        sys.stdout.flush()
    finally:  # the log's disk may be full
        os._exit(EXIT_RESUMABLE)
