"""Spreading a module over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def data_parallel(module: torch.nn.Module, device: torch.device) -> DistributedDataParallel:
    """`module`, which is on `device` already, in DDP with gradient buckets that never change.

    DDP lays its buckets out anew after the first backward pass, in the order in which gradients became ready. Where an
    element stands in a bucket decides in which order the ranks' gradients are added, so that a resumed run, whose
    first step would use the first layout again, would differ from the uninterrupted one in the last bit. One backward
    pass of zeros, in the reverse order of the parameters, makes DDP settle before the first step.
    """
    wrapped = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    own_forward = module.__dict__.get("forward")  # as a rule there is none, and the class's is used
    try:
        module.forward = lambda: _zero(module)
        wrapped().backward()
        wrapped.reducer._rebuild_buckets()
    finally:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward
    module.zero_grad(set_to_none=True)
    return wrapped


def _zero(module: torch.nn.Module) -> torch.Tensor:
    """Zero, with a gradient of zeros for every parameter; autograd goes through the last one first."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + parameter.flatten()[:1].sum() * 0.0
    return total


def unwrapped(value: Any) -> Any:
    """The module inside DDP's, so that a checkpoint is the same for one rank and for many."""
    return value.module if isinstance(value, DistributedDataParallel) else value
