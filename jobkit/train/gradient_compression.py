"""Sending less: compressed gradients, and replicas that average their parameters only now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from jobkit.checkpoint.state import flatten, unflatten


class Compression:
    """A gradient compression hook on a DDP module; PowerSGD's memory is what its state_dict holds.

    PowerSGD (arXiv:1905.13727) sends an approximation of rank `powersgd_rank` and keeps what it has not sent yet, for
    the next step: on each rank another. It starts after `powersgd_start` steps of whole gradients.
    """

    def __init__(self, model: DistributedDataParallel, hook: str, powersgd_rank: int = 1, powersgd_start: int = 10):
        self.power_sgd: powerSGD_hook.PowerSGDState | None = None
        if hook == "powersgd":
            self.power_sgd = powerSGD_hook.PowerSGDState(
                model.process_group,
                matrix_approximation_rank=powersgd_rank,
                start_powerSGD_iter=max(2, powersgd_start),  # what torch demands
            )
            model.register_comm_hook(self.power_sgd, powerSGD_hook.powerSGD_hook)
        else:
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            model.register_comm_hook(model.process_group, hooks[hook])

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet; empty for hooks without a memory."""
        if self.power_sgd is None:
            return {}
        return dict(self.power_sgd.__getstate__())  # type: ignore[no-untyped-call]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank."""
        if self.power_sgd is not None and state:
            group = self.power_sgd.process_group  # which it replaces by the whole world
            self.power_sgd.__setstate__(dict(state))  # type: ignore[no-untyped-call]
            self.power_sgd.process_group = group


def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace floating-point tensors by their mean over the ranks of a group, in place."""
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
            average([*module.parameters(), *module.buffers()], group)
        for optimizer in optimizers:
            states = (optimizer.state[p] for one in optimizer.param_groups for p in one["params"])
            average([state["ema"] for state in states if "ema" in state], group)


def averaged_copy(tree: Any, group: dist.ProcessGroup | None = None) -> Any:
    """A copy of a state_dict with every floating-point tensor in it averaged over the ranks of a group."""
    skeleton, tensors = flatten(tree)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    average(copies.values(), group)
    return unflatten(skeleton, copies)
