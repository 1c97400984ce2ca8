"""`on_nan: skip`: a batch whose loss is not a number changes nothing, on all ranks alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.run.config import CommConfig
from jobkit.train.parallel import unwrapped


class LeftOutBatches:
    """Decides of each update whether its batches count. The loss of ctx.backward is the same on all ranks, and so is
    the decision. It waits for the device once an update.

    Raises UsageError for a kind of communication that keeps something of a batch that is left out.
    """

    def __init__(self, comm: CommConfig) -> None:
        if comm.local_sgd > 1 or comm.hook == "powersgd":
            kept = "comm.local_sgd" if comm.local_sgd > 1 else "comm.hook: powersgd"
            raise UsageError(f"on_nan: skip is not for {kept}, in which ranks keep something of each batch")
        self.in_a_row = 0
        """Steps in a row of which an update was left out."""
        self._bad: Tensor | None = None
        """Of the losses since the last update, each less itself: 0 unless one of them is no number."""
        self._buffers: dict[Tensor, Tensor] = {}
        """The buffers of models as they were before the first of those forwards, as running means are."""
        self._decided: bool | None = None
        """For the updates since the last backward: several optimizers may use its gradients."""
        self._has_left_out = False

    def before_forward(self, model: nn.Module) -> None:
        """A forward of a model follows that may change its buffers."""
        if self._decided is not None:
            self._bad, self._buffers, self._decided = None, {}, None
        for buffer in unwrapped(model).buffers():
            if buffer not in self._buffers:
                self._buffers[buffer] = buffer.detach().clone()

    def see(self, loss: Tensor) -> None:
        """The loss of a batch whose gradients the next update uses."""
        nothing = loss.detach() - loss.detach()
        self._bad = nothing if self._bad is None else self._bad + nothing

    def is_left_out(self) -> bool:
        """Whether the update that follows is not to be made; the models' buffers are then put back."""
        if self._decided is None:
            self._decided = self._bad is not None and self._bad.item() != 0
            if self._decided:
                self._has_left_out = True
                self._put_back()
        return self._decided

    @torch.no_grad()
    def _put_back(self) -> None:
        for buffer, before in self._buffers.items():
            buffer.copy_(before)

    def end_step(self) -> bool:
        """Whether an update of the step was left out."""
        found, self._has_left_out = self._has_left_out, False
        self.in_a_row = self.in_a_row + 1 if found else 0
        return found
