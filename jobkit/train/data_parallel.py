"""Copies of a model on several ranks: DDP with settled buckets, and what concerns all kinds of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jobkit.train.hooks import uncompiled


def data_parallel(
    module: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None, bucket_cap_mb: int = 25
) -> DistributedDataParallel:
    """`module`, which is on `device` already, in DDP with gradient buckets that never change.

    DDP lays its buckets out again after the first backward pass, in the order in which gradients became ready. Where an
    element stands in a bucket decides in which order the ranks' gradients are added, so that a resumed run, whose
    first step would use the first layout again, would differ from the uninterrupted one in the last bit. One backward
    pass of zeros, in the reverse order of the parameters, makes DDP do so before the first step.
    """
    wrapped = DistributedDataParallel(
        module,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=group,
        bucket_cap_mb=bucket_cap_mb,
    )
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


def _zero(module: nn.Module) -> Tensor:
    """Zero, with a gradient of zeros for every parameter; autograd goes through the last one first."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + parameter.flatten()[:1].sum() * 0.0
    return total


@contextmanager
def without_synchronisation(model: nn.Module) -> Iterator[None]:
    """While inside, gradients stay on this rank: DDP's no_sync, and FSDP2's counterpart."""
    model = uncompiled(model)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)
        with no_sync():
            yield


def synchronise_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group the first one's buffers (BatchNorm's statistics), as DDP does before a forward."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for buffer in module.buffers():
        if not isinstance(buffer, DTensor):
            dist.broadcast(buffer, source, group=group)
