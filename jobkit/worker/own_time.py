"""How much of a step is a rank's own, and not spent waiting for others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in time, on a device's stream or on the clock; torch.cuda.Event and its kin have this form."""

    def record(self) -> None:
        """It is now, or when the device gets here."""

    def query(self) -> bool:
        """Whether it has come."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another one."""


class HostMark:
    """A Mark on the clock, for a device whose work is done when its calls return."""

    def record(self) -> None:
        """It is now."""
        self.time = time.perf_counter()

    def query(self) -> bool:
        """It has come."""
        return True

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from here to another one."""
        return (end.time - self.time) * 1e3


def marks_of(device: torch.device) -> Callable[[], Mark]:
    """What makes Marks of a device: events on its stream, read later, once it has come to them; nobody waits for it."""
    if device.type == "cpu":
        return HostMark
    return partial(torch.get_device_module(device).Event, enable_timing=True)


class ComputeTimer:
    """The part of each step before a rank first waits for others: until the last forward of the step has ended.

    The others' gradients are waited for after it, in backward. Where a forward itself waits for others (sharded,
    tensor- and pipeline-parallel models: `forward_waits`) it is the part before the first forward: loading data.
    What a rank does after backward is not seen. A wait inside, as for DDP's broadcast of buffers, makes the ranks look
    more alike than they are.

    Args:
        new_mark: makes the marks of this rank's device.
    """

    def __init__(self, new_mark: Callable[[], Mark] = HostMark) -> None:
        self._new_mark = new_mark
        self.forward_waits = False
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._began = 0.0
        self._unread: deque[tuple[Mark, Mark]] = deque()
        self._own, self._own_steps = 0.0, 0
        self._whole, self._whole_steps = 0.0, 0

    def watch(self, model: torch.nn.Module, forward_waits: bool = False) -> None:
        """Take notice of this model's forwards."""
        self.forward_waits = self.forward_waits or forward_waits
        if forward_waits:
            model.register_forward_pre_hook(lambda *_: self.forward_begins(), prepend=True)  # before FSDP gathers
        else:
            model.register_forward_hook(self._forward_ended)

    def begin(self) -> None:
        """A step begins, or begins anew: the ranks have just been together."""
        self._begin, self._end = self._new_mark(), None
        self._begin.record()
        self._began = time.perf_counter()

    def forward_begins(self) -> None:
        """Where forwards wait for others, the first one of a step ends what is the rank's own."""
        if self.forward_waits and self._end is None:
            self._forward_ended()

    def _forward_ended(self, *_: Any) -> None:
        if self._begin is not None:
            self._end = self._end or self._new_mark()
            self._end.record()

    def end(self) -> None:
        """The step is over."""
        if self._begin is not None and self._end is not None:
            self._unread.append((self._begin, self._end))
        self._begin = None
        self._whole += time.perf_counter() - self._began
        self._whole_steps += 1

    def take(self) -> tuple[float, float]:
        """Mean seconds a step since the last call: the rank's own, 0 where it is not known, and in all."""
        while self._unread and self._unread[0][1].query():
            begin, end = self._unread.popleft()
            self._own += begin.elapsed_time(end) / 1e3
            self._own_steps += 1
        own, whole = self._own / max(1, self._own_steps), self._whole / max(1, self._whole_steps)
        self._own, self._own_steps, self._whole, self._whole_steps = 0.0, 0, 0.0, 0
        return own, whole
