"""Compressed gradients: less to send in each step of DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Compression:
    """A gradient compression hook on a DDP module; PowerSGD's memory is what its state_dict holds.

    PowerSGD (arXiv:1905.13727) sends an approximation of rank `powersgd_rank` and keeps what it has not sent yet, for
    the next step: on each rank another. It starts after `powersgd_start` steps of whole gradients.
    """

    def __init__(self, model: DistributedDataParallel, hook: str, powersgd_rank: int = 1, powersgd_start: int = 10):
        self.device = next(model.parameters()).device
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
        """Continue with a memory of `state_dict`; what comes from a checkpoint is on the CPU, gradients may not be."""
        if self.power_sgd is not None and state:
            group = self.power_sgd.process_group  # which it replaces by the whole world
            here = {key: _moved(value, self.device) for key, value in state.items()}
            self.power_sgd.__setstate__(here)  # type: ignore[no-untyped-call]
            self.power_sgd.process_group = group


def _moved(value: Any, device: torch.device) -> Any:
    """A value of PowerSGD's state with its tensors on a device: they are in dicts, by the number of the bucket."""
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
