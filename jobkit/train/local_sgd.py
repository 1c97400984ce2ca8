"""Local SGD (arXiv:1805.09767): replicas that take steps of their own and become their mean only now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from jobkit.checkpoint.state import flatten, unflatten


def _average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_world_size(group)
    for tensor in tensors:
        if tensor.is_floating_point():
            dist.all_reduce(tensor, group=group)
            tensor /= ranks


def average_replicas(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Local SGD's synchronisation: parameters, buffers and moving averages become their mean over the ranks."""
    with torch.no_grad():
        for module in modules:
            _average([*module.parameters(), *module.buffers()], group)
        for optimizer in optimizers:
            states = (optimizer.state[p] for one in optimizer.param_groups for p in one["params"])
            _average([state["ema"] for state in states if "ema" in state], group)


def averaged_copy(tree: Any, group: dist.ProcessGroup | None = None) -> Any:
    """A copy of a state_dict with the mean over a group's ranks in place of each floating-point tensor."""
    skeleton, tensors = flatten(tree)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    _average(copies.values(), group)
    return unflatten(skeleton, copies)
