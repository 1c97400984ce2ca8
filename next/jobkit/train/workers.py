"""The start of a DataLoader's worker: the stop signals are for the rank, which saves and then ends its workers.

torchrun, timeout and a shell send SIGTERM to a whole process group. A worker that it ends would be an error of the rank
before the rank comes to save. Every loader that jobkit reads begins its workers so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable


class WorkerInit:
    """A worker_init_fn that leaves the stop signals alone, and then calls the script's own."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        for stop in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(stop, signal.SIG_IGN)
        if self._init is not None:
            self._init(number)
