"""ctx.evaluating: evaluation mode, averaged weights, and everything back at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from jobkit.train.seeds import preserved_generators


@contextmanager
def evaluating(
    model: nn.Module,
    averaged: AbstractContextManager[None],
    devices: tuple[torch.device, ...],
) -> Iterator[None]:
    """Within it, the model is in evaluation mode and has its averaged weights, where there are any.

    At the end each submodule's own mode, the weights and the random generators are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    with preserved_generators(*devices), averaged:
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
