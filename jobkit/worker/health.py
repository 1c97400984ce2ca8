"""Losses that are not finite numbers: noticed before anything that they changed is saved.

    ctx.backward, ctx.log({"train/loss": loss}) --> Health --bad?--> agreement --> NotFinite on the rank that saw it

A tensor on a device is read at the next agreement alone: a look at each step would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jobkit.errors import JobkitError


class NotFinite(JobkitError):
    """A loss was no finite number: the run ends as failed, with the step and the samples of this rank."""

    final = True
    """Another attempt would come to the same step."""

    def __init__(self, step: int, value: float, samples: Sequence[int]) -> None:
        super().__init__(
            f"the loss of step {step} is {value}; the newest checkpoint holds nothing of it (on_nan: ignore goes on)"
        )
        self.step, self.samples = step, list(samples)


class Health:
    """Watches the losses of one rank."""

    def __init__(self, *, ignores: bool) -> None:
        self._ignores = ignores
        self._unread: list[tuple[int, torch.Tensor, Callable[[], list[int]]]] = []
        self.error: NotFinite | None = None
        """The error to raise, on the rank that saw the loss."""

    def see(self, step: int, loss: Any, samples: Callable[[], list[int]]) -> None:
        """Look at a loss, or keep it until the next agreement; `samples` gives the ids of its samples."""
        if self._ignores or self.error is not None:
            return
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                return
            if loss.device.type != "cpu":
                self._unread.append((step, loss.detach(), samples))
                return
            loss = loss.detach()
        value = float(loss)
        if not math.isfinite(value):
            self.error = NotFinite(step, value, samples())

    def is_bad(self) -> bool:
        """Return whether a loss since the last call was no finite number. Waits for the device."""
        unread, self._unread = self._unread, []
        if unread and self.error is None:
            values = torch.stack([loss.reshape(()).float() for _, loss, _ in unread]).tolist()
            for value, (step, _, samples) in zip(values, unread, strict=True):
                if not math.isfinite(value):
                    self.error = NotFinite(step, value, samples())
                    break
        return self.error is not None
