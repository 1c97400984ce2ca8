"""The end of a run: weights, last checkpoint and result, durable even where the disk is full for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from jobkit.errors import JobkitError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.disk_errors import disk_errno
from jobkit.train.engine import Engine
from jobkit.worker.export import whole_weights, write_weights
from jobkit.worker.lease import check_lease
from jobkit.worker.rank import Rank
from jobkit.worker.stop import StopSignals
from jobkit.worker.tracked_state import TrackedState

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
        number, told = group.maximum(disk_errno(error), signals.pending)
        if not number:
            return
        if not pause or told:
            raise error or OSError(int(number), f"{os.strerror(int(number))} on another rank")
        if group.is_main:
            log.warning("cannot finish: %s. Waiting for the disk ...", error or os.strerror(int(number)))
        time.sleep(pause)


def export(rank: Rank, engine: Engine, tracked: TrackedState) -> None:
    """final/<name>.safetensors for each tracked module, complete or absent: the averaged weights where there are.

    All ranks take part, where each has a part of the weights; rank 0 writes.
    """
    modules = {name: value for name, value in tracked.objects.items() if isinstance(value, torch.nn.Module)}
    with ExitStack() as averages:
        for value in tracked.objects.values():
            if isinstance(value, torch.optim.Optimizer):
                averages.enter_context(engine.averaged(value))
        tracked.share_buffers()
        problem: Exception | None = None
        for name, module in modules.items():
            weights = whole_weights(module)
            if rank.is_main and problem is None:
                try:
                    check_lease(rank.run, rank.attempt)  # putting them together took its time
                    write_weights(rank.run.final, name, weights)
                except (OSError, JobkitError) as error:
                    problem = error  # raised later: the other ranks put the next module together with this one
        if problem is not None:
            raise problem
