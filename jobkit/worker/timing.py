"""How long steps take, and how much of a step a rank computes before it waits for the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jobkit.train.hooks import ForwardHook

AGREEMENT_SECONDS = 0.25
"""How often the ranks agree on a stop: an agreement waits for all of them, and one a step would slow short steps."""

MAX_STEPS_BETWEEN_AGREEMENTS = 32
"""So that steps which suddenly take a hundred times longer do not put a stop off for minutes."""

PERFORMANCE_SECONDS = 1.0
"""How often the loop logs its own curves (learning rate, samples and time a step, epoch)."""


class StepTimer:
    """The clock of one loop; equal decisions on all ranks follow from equal arguments."""

    def __init__(self) -> None:
        self.agree_at = 0
        """The ranks agree when this many steps are done."""
        self.steps_per_second: float | None = None
        self._since_step, self._since = 0, 0.0
        self._sampled_step, self._sampled = 0, 0.0

    def start(self, step: int) -> None:
        self.agree_at = step + 1
        self._since_step, self._since = step, time.perf_counter()
        self._sampled_step, self._sampled = step, self._since

    def measure(self, step: int) -> float:
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, step - self._since_step)
        self._since_step, self._since = step, now
        return seconds

    def agree_after(self, step: int, seconds_a_step: float) -> None:
        """The next agreement: after AGREEMENT_SECONDS of such steps, the same step on every rank."""
        steps = int(AGREEMENT_SECONDS / max(seconds_a_step, 1e-6))
        self.agree_at = step + max(1, min(MAX_STEPS_BETWEEN_AGREEMENTS, steps))

    def sample(self, step: int) -> float | None:
        """Seconds a step, once every PERFORMANCE_SECONDS, else None."""
        now = time.perf_counter()
        if now - self._sampled < PERFORMANCE_SECONDS or step == self._sampled_step:
            return None
        seconds = (now - self._sampled) / (step - self._sampled_step)
        self._sampled_step, self._sampled = step, now
        self.steps_per_second = 1 / seconds
        return seconds


class HostEvent:
    """What torch.cuda.Event is on a stream, on the clock: for a device whose work is done when its calls return."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.time - self.time) * 1e3


def events_of(device: torch.device) -> Callable[[], Any]:
    """What makes events on a device's stream, read later, once it has come to them; nobody waits for it."""
    event = None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)
    return HostEvent if event is None else partial(event, enable_timing=True)


class ComputeTimer:
    """The part of each step before a rank first waits for others: until the last forward of the step has ended.

    The others' gradients are waited for after it, in backward. Where a forward itself waits for others (sharded,
    tensor- and pipeline-parallel models: `forward_waits`) it is the part before the first forward: loading data.
    What a rank does after backward is not seen. A wait inside, as for DDP's broadcast of buffers, makes the ranks look
    more alike than they are.
    """

    def __init__(self, new_event: Callable[[], Any] = HostEvent) -> None:
        self._new_event = new_event
        self.forward_waits = False
        self._begin: Any = None
        self._end: Any = None
        self._began = 0.0
        self._unread: deque[tuple[Any, Any]] = deque()
        self._own, self._own_steps = 0.0, 0
        self._whole, self._whole_steps = 0.0, 0

    def watch(self, model: torch.nn.Module, forward_waits: bool = False) -> None:
        self.forward_waits = self.forward_waits or forward_waits
        if forward_waits:
            model.register_forward_pre_hook(ForwardHook(self.forward_begins), prepend=True)  # before FSDP gathers
        else:
            model.register_forward_hook(ForwardHook(self._forward_ended))

    def begin(self) -> None:
        self._begin, self._end = self._new_event(), None
        self._begin.record()
        self._began = time.perf_counter()

    def forward_begins(self) -> None:
        """Where forwards wait for others, the first one of a step ends what is the rank's own."""
        if self.forward_waits and self._end is None:
            self._forward_ended()

    def _forward_ended(self) -> None:
        if self._begin is not None:
            self._end = self._end or self._new_event()
            self._end.record()

    def end(self) -> None:
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
