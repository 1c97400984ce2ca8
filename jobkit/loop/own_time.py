"""The seconds of each step that a rank works before it waits for others: what tells a slow rank from those it delays.

    begin_step .. data, forward .. end of the last forward | backward: all ranks wait for each other's gradients
    own seconds --in each agreement's all-reduce--> rank 0 --median--> progress.json --> status

loop.py owns the clock. The work in and after backward is not seen. DDP's broadcast of buffers, a wait within the
forward, makes ranks look alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WINDOW = 9
"""Readings, one an agreement, whose median is a rank's time: a slow read of a file is no slow rank."""


class HostEvent:
    """A torch.cuda.Event for a device whose work is done when a call returns."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._time - self._time) * 1e3


class OwnTime:
    """The clock of one rank. On a GPU events are read once the device has come to them; nobody waits for it."""

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._options = {} if device.type == "cpu" else {"enable_timing": True}
        self._event: Any = HostEvent if device.type == "cpu" else torch.get_device_module(device).Event
        self._rank, self._world_size = rank, world_size
        self._begin: Any = None
        self._end: Any = None
        self._parts: list[tuple[Any, Any, bool]] = []
        self._readings: deque[Sequence[float]] = deque(maxlen=WINDOW)

    def watch(self, module: nn.Module) -> None:
        """See the forwards of a module: DDP's waits in backward, that of another in the forward, as for shards."""
        if self._world_size > 1 and isinstance(module, DistributedDataParallel):
            module.register_forward_hook(self.ends)
        elif self._world_size > 1:
            module.register_forward_pre_hook(self.waits, prepend=True)

    def begin(self, *, is_step: bool = True) -> None:
        """The rank's own work begins: that of a step, or more of it, as loading the next batch."""
        self.close()
        if self._world_size > 1:
            self._begin, self._is_step = self._now(), is_step

    def ends(self, *_: Any) -> None:
        """It ends here, if it does not end later in this step."""
        if not torch.compiler.is_compiling() and self._begin is not None:  # a clock would break a compiled graph
            self._end = self._now()

    def waits(self, *_: Any) -> None:
        """It ends here, if it has not ended before."""
        if not torch.compiler.is_compiling() and self._end is None:
            self.ends()

    def close(self) -> None:
        """The step is over."""
        if self._begin is not None and self._end is not None:
            self._parts.append((self._begin, self._end, self._is_step))
        self._begin = self._end = None

    def share(self) -> list[float]:
        """Return this rank's seconds a step since the last call at its place, else zeros: for a maximum of all ranks.

        Its place is 0 too where no forward was seen.
        """
        done = list(takewhile(lambda part: part[1].query(), self._parts))
        del self._parts[: len(done)]
        steps = sum(is_step for _, _, is_step in done)
        seconds = sum(begin.elapsed_time(end) for begin, end, _ in done) / 1e3 / max(1, steps)
        return [seconds if rank == self._rank and steps else 0.0 for rank in range(self._world_size)]

    def median(self, shares: Sequence[float]) -> list[float] | None:
        """Return, on rank 0, each rank's median time with a new reading: the maximum of all ranks' shares."""
        if self._rank == 0 and min(shares) > 0:
            self._readings.append(shares)
        return np.median(self._readings, axis=0).round(6).tolist() if len(self._readings) == WINDOW else None

    def _now(self) -> Any:
        event = self._event(**self._options)
        event.record()
        return event
