"""Whether a rank computes the same bits twice: a device that computes wrongly without an error is found by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jobkit.train.data_parallel import without_synchronisation
from jobkit.train.parallel import unwrapped
from jobkit.train.seeds import preserved_generators


def computes_alike(model: nn.Module, compute: Callable[[], Tensor], devices: Sequence[torch.device]) -> bool:
    """Whether `compute`, a loss of the model and its backward, has the same loss and gradients twice, bit for bit.

    On this rank: gradients are not sent to others. Gradients, buffers and random numbers are then as they were before.
    """
    own = unwrapped(model)
    parameters = [parameter for parameter in own.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in own.buffers()]
    results: list[list[Tensor | None]] = []
    try:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            with preserved_generators(*devices), without_synchronisation(model):
                loss = compute()
            results.append([loss.detach(), *(parameter.grad for parameter in parameters)])
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return all(_same_bits(one, other) for one, other in zip(*results, strict=True))


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    bits = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)
