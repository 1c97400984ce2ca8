"""The end of a run: what it cannot end without becomes durable even where the disk is full for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.disk_errors import disk_errno
from jobkit.worker.stop import StopSignals

FULL_DISK_PAUSES: tuple[float, ...] = (1, 2, 4, 8, 15, 15, 15)
"""Seconds between two tries to end a run whose disk is full: a minute, in which somebody may make room."""


def retry_on_full_disk(group: RankGroup, signals: StopSignals, action: Callable[[], None]) -> None:
    """Do, on all ranks together, what the run cannot end without; a disk that refuses it is given a minute.

    After that, or when this process has been told to stop, it is the disk's error on all ranks, and for another
    attempt.
    """
    for pause in (*FULL_DISK_PAUSES, 0):
        error: Exception | None = None
        try:
            action()
        except Exception as raised:
            if not disk_errno(raised):
                raise
            error = raised
        # All ranks go on or try again together: the action has collectives in it.
        number, told = group.maximum(disk_errno(error), signals.pending)
        if not number:
            return
        if not pause or told:
            raise error or OSError(int(number), f"{os.strerror(int(number))} on another rank")
        if group.is_main:
            log.warning("cannot finish: %s. Waiting for the disk ...", error or os.strerror(int(number)))
        time.sleep(pause)
