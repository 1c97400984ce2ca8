"""Whether the losses of a run are numbers: a run that goes on with one that is not trains nothing any more.

On the CPU a loss is looked at where it is computed. On a device nobody waits for it: what says whether a step's losses
were numbers is copied to the host beside the training, and looked at when it has come there, a step or two later. A
checkpoint waits for it: none holds what came of such a loss.

One that is not a number need not harm: the mean over no labels is nan, and its gradients are zero. So the weights and
gradients are looked at then, and only then: where they are finite the run goes on.
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
from torch.distributed.tensor import DTensor

from jobkit.errors import NotFinite
from jobkit.log import log
from jobkit.run.device_kinds import has_streams
from jobkit.run.status import Attempt
from jobkit.worker.timing import events_of

LOSS = re.compile(r"(?:train[/_.])?loss")
"""Tags of ctx.log whose values are losses of the training: what is logged of an evaluation may be no number."""

UNREAD = 64
"""Steps of which it is not known yet: a program that is further ahead of its device waits for it."""

IN_A_ROW = 8
"""Steps in a row whose loss may be no number with fp16, whose loss scale leaves such batches out by itself."""

UNUSED_IN_A_ROW = 100
"""Such steps in a row without harm that no optimizer has used: a loss scale of the script's own leaves them
all out, and nothing is trained any more. Gradients that are added up over fewer steps are not meant."""

SKIPS_IN_A_ROW = 10
"""Batches that may be left out one after the other: then it is the model that gives no numbers any more."""

MAX_SAMPLES = 256
"""Ids of a batch that is left out which the journal keeps."""

GO_BACK = "`jobkit rewind RUN --step N --skip-samples IDS` leaves samples out, on_nan: skip such batches"
LEAVE_OUT = "on_nan: skip leaves such batches out"
"""What to do about such a loss: with a checkpoint to go back to, and without one."""

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
    was_used: bool


class LossWatch:
    """Looks at the losses of one rank's steps; raises NotFinite for one that is not a number and has done harm.

    Args:
        is_harmed: whether this rank's weights or gradients are not finite, or none are known; asked only after such a
            loss.
        updates: how many steps the optimizers have done.
        can_go_back: whether there is a checkpoint, for what to do is told.
        allowed_in_a_row: such steps without harm that no optimizer has used.
    """

    def __init__(
        self,
        device: torch.device,
        on_nan: str = "stop",
        *,
        is_harmed: Callable[[], bool] = lambda: True,
        updates: Callable[[], int] = lambda: 0,
        can_go_back: Callable[[], bool] = lambda: False,
        suspect: Suspect | None = None,
        allowed_in_a_row: int = UNUSED_IN_A_ROW,
    ) -> None:
        self.is_on = on_nan in ("stop", "rerun")
        self._reruns = on_nan == "rerun"
        self.suspect = suspect if self._reruns else None
        """The step that this attempt repeats; None where there is none, or it had another result."""
        self.is_harmed, self._updates, self._updated = is_harmed, updates, 0
        self._can_go_back = can_go_back
        self.harmless = 0
        """Steps of this attempt whose loss was no number, without harm."""
        self.doubt: NotFinite | None = None
        """Of the first such step that no other rank was asked about: of a model that ranks share out this one sees its
        own part alone."""
        self._allowed = allowed_in_a_row
        self._in_a_row = 0
        self._has_streams = has_streams(device.type)
        self._new_event = events_of(device)
        self._unread: deque[_Unread] = deque()
        self._found: float | None = None
        """A loss of the step under way that is not a number."""
        self._has_seen_share = False
        self._sum: Tensor | None = None
        """Of the step's losses on a device, each less itself: 0 unless one of them is not a number."""

    def see_share(self, loss: Tensor) -> None:
        """The loss of this rank's share of a batch, before it is known of the others'."""
        self._has_seen_share = True
        self._note(loss)

    def see_mean(self, mean: Tensor) -> bool:
        """Whether the mean over all shares is no number, and known to be none, so that harm is to be looked for."""
        return self.is_on and mean.device.type == "cpu" and not math.isfinite(mean)

    def raise_found(self, step: int, samples: Samples) -> None:
        """Raise for the loss of this rank's share, if that was no number."""
        if self._found is not None:
            raise self._error(step, samples, str(self._found))

    def see(self, loss: Tensor | float, step: int, samples: Samples) -> None:
        """A loss of the step under way."""
        # Else it may be harmed when the step has ended: a loss may be logged before its backward.
        if self._note(loss) and self.is_harmed():
            self.raise_found(step, samples)

    def _note(self, loss: Tensor | float) -> bool:
        """Whether it is known that a loss is no number."""
        if not self.is_on:
            return False
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            own = loss.detach().reshape(())
            nothing = own - own
            self._sum = nothing if self._sum is None else self._sum + nothing
            return False
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)  # torch warns of one with a gradient
        if math.isfinite(value):
            return False
        self._found = value
        return True

    def see_logged(self, values: Mapping[str, Any], step: int, samples: Samples) -> None:
        """What is logged in the step under way: losses among it are looked at, unless those of shares were.

        What is logged then is the mean over all, and no number on ranks whose own samples are not to blame.
        """
        for tag, value in values.items() if self.is_on and not self._has_seen_share else ():
            if value is not None and LOSS.fullmatch(tag):
                self.see(value, step, samples)

    def end_step(self, step: int, samples: Samples) -> None:
        """All losses of a step were seen; raises for those of earlier steps that have come to the host."""
        was_used, self._updated = self._updates() != self._updated, self._updates()
        if self._found is not None:
            self._judge(step, samples, str(self._found), was_used)
        elif self._sum is not None:
            self._send(self._sum, step, samples, was_used)
        else:
            self._in_a_row = 0
        self._sum = self._found = None
        self._has_seen_share = False
        while self._unread and (len(self._unread) > UNREAD or self._has_come()):
            self._read()

    def settle(self) -> None:
        """Wait for what is not known yet of steps that have ended; raises as `see`."""
        while self._unread:
            self._read()

    def _has_come(self) -> bool:
        """Whether the oldest is on the host; where nothing is copied beside the program, only whoever waits knows."""
        return self._has_streams and bool(self._unread[0].arrived.query())

    def _send(self, total: Tensor, step: int, samples: Samples, was_used: bool) -> None:
        host, arrived = total, self._new_event()
        if self._has_streams:
            host = torch.empty((), dtype=total.dtype, pin_memory=True)
            host.copy_(total, non_blocking=True)
        arrived.record()
        self._unread.append(_Unread(step, samples, host, arrived, was_used))

    def _read(self) -> None:
        first = self._unread.popleft()
        if self._has_streams:
            first.arrived.synchronize()
        if first.host.item() == 0:
            self._in_a_row = 0
        else:
            self._judge(first.step, first.samples, "no finite number", first.was_used)

    def _judge(self, step: int, samples: Samples, found: str, was_used: bool) -> None:
        """Of a step that has ended: raise where its loss has done harm, or nothing is trained any more."""
        self._in_a_row = 0 if was_used else self._in_a_row + 1
        if self._in_a_row > self._allowed or self.is_harmed():
            raise self._error(step, samples, found)
        self.doubt = self.doubt or self._error(step, samples, found)
        if not was_used:
            return
        self.harmless += 1
        if self.harmless == 1:
            log.warning(
                "the loss of step %d is %s, and the weights and gradients are finite: the run goes on, and does not "
                "tell this again. The mean over labels that are all masked is nan: divide by max(count, 1). The "
                "samples of this rank's batch: %s",
                step,
                found,
                ", ".join(map(str, samples()[:MAX_SAMPLES])) or "not known",
            )

    def _error(self, step: int, samples: Samples, found: str) -> NotFinite:
        what_to_do = f"it is the data's or the model's; {GO_BACK if self._can_go_back() else LEAVE_OUT}"
        if self.suspect is not None and self.suspect.step == step:
            again = f"{found}, and was when it was first computed: {what_to_do}"
            return NotFinite(step, samples(), again)
        if self._reruns:
            return NotFinite(step, samples(), f"{found}: the steps up to it are repeated", repeats=True)
        return NotFinite(step, samples(), f"{found}: {what_to_do}")


def is_harmed(parameters: Sequence[Tensor], *, with_gradients: bool) -> bool:
    """Whether one of these parameters, or of their gradients that there are, is not finite: of sharded ones this rank's
    part. Waits for the device."""
    gradients = [one.grad for one in parameters if one.grad is not None] if with_gradients else []
    return not all(map(_is_finite, [*parameters, *gradients]))


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own = own._values() if own.is_sparse else own
    own = own.float() if own.is_floating_point() and own.dtype.itemsize == 1 else own  # torch has no isfinite of float8
    return bool(own.isfinite().all())
