"""Copies of a model on several ranks: DDP, and what concerns all kinds of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.train.collectives import contiguous
from jobkit.train.devices import is_spread_by_hand
from jobkit.train.hooks import uncompiled

DEFAULT_BUCKET_MB = 25

OPTIONS = ("find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view")
"""What DDP may be asked for."""


def data_parallel(
    module: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = DEFAULT_BUCKET_MB,
    **options: Any,
) -> DistributedDataParallel:
    """`module`, which is on `device` already, in DDP; `options` are those of OPTIONS.

    jobkit.train.gradient_order keeps the layout of its gradient buckets over a resume.
    """
    if "broadcast_buffers" in options and "forward_sync_buffers" in signature(DistributedDataParallel).parameters:
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")  # its name since PyTorch 2.13
    return DistributedDataParallel(
        module,
        # DDP moves inputs to it: not for a model that has several devices, or one without a number.
        device_ids=None if device.index is None or is_spread_by_hand(module, device) else [device.index],
        process_group=group,
        # Where no size is given DDP makes the first bucket a small one, so that sending begins early.
        bucket_cap_mb=None if bucket_cap_mb == DEFAULT_BUCKET_MB else bucket_cap_mb,
        **options,
    )


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
        if getattr(model, "static_graph", False):
            raise UsageError(
                "static_graph=True: DDP cannot begin a static graph with gradients that stay on the rank, as those of "
                "all but the last micro-batch do: leave micro_batch_size out, or static_graph"
            )
        no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)
        with no_sync():
            yield


def send_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group the first one's values, in place: of buffers, as DDP does before a forward."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            with contiguous(tensor) as sent:
                dist.broadcast(sent, source, group=group)
