"""Losses that are not finite numbers: noticed before anything that they changed is saved.

    ctx.backward, ctx.log({"train/loss": loss}) --> Health --bad?--> agreement --> NotFinite on the rank that saw it

A tensor on a device is read at an agreement, once the device has computed it: a look at each step would wait for the
device. Only before a save all are waited for. loop.py reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jobkit.errors import JobkitError

Samples = Callable[[], list[int]]


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
        self._unread: list[tuple[int, torch.Tensor, Samples]] = []
        self._on_the_way: list[tuple[torch.Tensor, Any, list[tuple[int, Samples]]]] = []
        """Losses that are copied to the host, and the event after which they are there."""
        self.error: NotFinite | None = None
        """The error to raise, on the rank that saw the loss."""

    def see(self, step: int, loss: Any, samples: Samples) -> None:
        """Look at a loss, or keep it until the device has computed it; `samples` gives the ids of its samples."""
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

    def is_bad(self, *, waits: bool = True) -> bool:
        """Return whether a loss so far was no finite number; without `waits`, of those that are known by now.

        To wait at each agreement would let the device run dry, where each step has one.
        """
        self._send_for_values()
        while self._on_the_way and self.error is None:
            values, event, losses = self._on_the_way[0]
            if event is not None and not waits and not event.query():
                break
            if event is not None:
                event.synchronize()
            del self._on_the_way[0]
            for value, (step, samples) in zip(values.tolist(), losses, strict=True):
                if not math.isfinite(value) and self.error is None:
                    self.error = NotFinite(step, value, samples())
        return self.error is not None

    def _send_for_values(self) -> None:
        """Let each device send its losses to the host once it has computed them."""
        unread, self._unread = self._unread, []
        for device in dict.fromkeys(loss.device for _, loss, _ in unread):
            of_device = [item for item in unread if item[1].device == device]
            values = torch.stack([loss.reshape(()).float() for _, loss, _ in of_device])
            module, event = torch.get_device_module(device), None
            if hasattr(module, "current_stream"):  # mps has none: there it waits
                values = values.to("cpu", non_blocking=True)
                event = module.Event()
                event.record(module.current_stream(device))
            self._on_the_way.append((values, event, [(step, samples) for step, _, samples in of_device]))
