"""Whether the losses of a run are numbers: a run that goes on with one that is not trains nothing any more.

On the CPU a loss is looked at where it is computed. On a device nobody waits for it: what says whether a step's losses
were numbers is copied to the host beside the training, and looked at when it has come there, a step or two later. A
checkpoint waits for it: none holds what came of such a loss.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobkit.errors import NotFinite
from jobkit.run.device_kinds import has_streams
from jobkit.run.status import Attempt
from jobkit.worker.timing import events_of

LOSS = re.compile(r"(?:train[/_.])?loss")
"""Tags of ctx.log whose values are losses of the training: what is logged of an evaluation may be no number."""

UNREAD = 64
"""Steps of which it is not known yet: a program that is further ahead of its device waits for it."""

IN_A_ROW = 8
"""Steps in a row whose loss may be no number with fp16, whose loss scale leaves such batches out by itself."""

SKIPS_IN_A_ROW = 10
"""Batches that may be left out one after the other: then it is the model that gives no numbers any more."""

MAX_SAMPLES = 256
"""Ids of a batch that is left out which the journal keeps."""

WHAT_TO_DO = (
    "it is the data's or the model's; `jobkit rewind RUN --step N --skip-samples IDS` leaves samples out, on_nan: skip "
    "such batches"
)

Samples = Callable[[], list[int]]
"""Ids of a step's samples on this rank."""


@dataclass(frozen=True)
class Suspect:
    """A step whose loss was no number in an attempt before this one, which repeats it: `on_nan: rerun`."""

    step: int
    node: str | None
    """Slurm's name of where it was computed."""


def suspect_of(attempts: Sequence[Attempt], submission: int) -> Suspect | None:
    """The step that is to be repeated, of the attempts of a submission before this one; None where none is, or one has
    come past it since."""
    furthest = 0
    for attempt in reversed([one for one in attempts if one.submission == submission]):
        failure = attempt.failure
        if failure is not None and failure.faulty_node is not None:
            return None  # it had another result there
        if failure is not None and failure.not_finite and failure.step is not None:
            return Suspect(failure.step, failure.node) if furthest <= failure.step else None
        furthest = max(furthest, attempt.last_step or 0)
    return None


@dataclass(frozen=True)
class _Unread:
    step: int
    samples: Samples
    host: Tensor
    arrived: Any
    """An event that is recorded behind the copy."""


class LossWatch:
    """Looks at the losses of one rank's steps; raises NotFinite for one that is not a number."""

    def __init__(
        self, device: torch.device, on_nan: str = "stop", *, suspect: Suspect | None = None, allowed_in_a_row: int = 0
    ) -> None:
        self._is_on = on_nan in ("stop", "rerun")
        self._reruns = on_nan == "rerun"
        self.suspect = suspect if self._reruns else None
        """The step that this attempt repeats; None where there is none, or it had another result."""
        self._allowed = allowed_in_a_row
        self._in_a_row = 0
        self._has_streams = has_streams(device.type)
        self._new_event = events_of(device)
        self._unread: deque[_Unread] = deque()
        self._found: float | None = None
        """A loss of the step under way that is not a number."""
        self._sum: Tensor | None = None
        """Of the step's losses on a device, each less itself: 0 unless one of them is not a number."""

    def see(self, loss: Tensor | float, step: int, samples: Samples) -> None:
        """A loss of the step under way."""
        if not self._is_on:
            return
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            own = loss.detach().reshape(())
            nothing = own - own
            self._sum = nothing if self._sum is None else self._sum + nothing
            return
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)  # torch warns of one with a gradient
        if not math.isfinite(value):
            self._found = value
            if self._in_a_row >= self._allowed:
                raise self._error(step, samples, str(value))

    def see_logged(self, values: Mapping[str, Any], step: int, samples: Samples) -> None:
        """What is logged in the step under way: losses among it are looked at."""
        for tag, value in values.items() if self._is_on else ():
            if value is not None and LOSS.fullmatch(tag):
                self.see(value, step, samples)

    def end_step(self, step: int, samples: Samples) -> None:
        """All losses of a step were seen; raises for those of earlier steps that have come to the host."""
        if self._sum is None:
            self._count(self._found is None)
            self._found = None
        else:
            self._send(self._sum, step, samples)
            self._sum = None
        while self._unread and (len(self._unread) > UNREAD or self._has_come()):
            self._read()

    def settle(self) -> None:
        """Wait for what is not known yet of steps that have ended; raises as `see`."""
        while self._unread:
            self._read()

    def _has_come(self) -> bool:
        """Whether the oldest is on the host; where nothing is copied beside the program, only whoever waits knows."""
        return self._has_streams and bool(self._unread[0].arrived.query())

    def _send(self, total: Tensor, step: int, samples: Samples) -> None:
        host, arrived = total, self._new_event()
        if self._has_streams:
            host = torch.empty((), dtype=total.dtype, pin_memory=True)
            host.copy_(total, non_blocking=True)
        arrived.record()
        self._unread.append(_Unread(step, samples, host, arrived))

    def _read(self) -> None:
        first = self._unread.popleft()
        if self._has_streams:
            first.arrived.synchronize()
        is_finite = first.host.item() == 0
        self._count(is_finite)
        if not is_finite and self._in_a_row > self._allowed:
            raise self._error(first.step, first.samples, "no finite number")

    def _error(self, step: int, samples: Samples, found: str) -> NotFinite:
        if self.suspect is not None and self.suspect.step == step:
            again = f"{found}, and was when it was first computed: {WHAT_TO_DO}"
            return NotFinite(step, samples(), again)
        if self._reruns:
            return NotFinite(step, samples(), f"{found}: the steps up to it are repeated", repeats=True)
        return NotFinite(step, samples(), f"{found}: {WHAT_TO_DO}")

    def _count(self, is_finite: bool) -> None:
        self._in_a_row = 0 if is_finite else self._in_a_row + 1
