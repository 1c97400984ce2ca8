"""Copies of a model on several ranks: DDP with settled buckets, and fully_shard, which shares one copy out (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jobkit.train.collectives import contiguous
from jobkit.train.devices import is_spread_by_hand


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
        # DDP moves inputs to it: not for a model that has several devices, or one without a number.
        device_ids=None if device.index is None or is_spread_by_hand(module, device) else [device.index],
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


def shard(module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Shard a module's parameters over a mesh, in place, unit by unit (torch's fully_shard, "FSDP2").

    The units are what `module.shard_units()` says, else the children of an nn.Sequential, else the module as a whole.
    With a mesh of two dimensions parameters are copied over the first and sharded over the second.
    """
    units: Iterable[nn.Module] = ()
    if hasattr(module, "shard_units"):
        units = module.shard_units()  # type: ignore[operator]
    elif isinstance(module, nn.Sequential):
        units = [child for child in module if any(True for _ in child.parameters())]
    owned: set[nn.Parameter] = set()
    for unit in units:
        parameters = set(unit.parameters())
        if not parameters & owned:  # a parameter that two units share stays with the whole
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
            owned |= parameters
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)


def reshard(module: nn.Module) -> None:
    """Drop what ranks have gathered of each other's parameters and kept, as zero2 does from one forward to the next.

    Parameters that were changed by hand would otherwise not be seen by the next forward.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def without_synchronisation(model: nn.Module) -> Iterator[None]:
    """While inside, gradients stay on this rank: DDP's no_sync, and FSDP2's counterpart."""
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
            with contiguous(buffer) as sent:
                dist.broadcast(sent, source, group=group)
