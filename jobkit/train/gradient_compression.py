"""Compressed gradients: less to send in each step of DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


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
        if self.power_sgd is not None and state:
            group = self.power_sgd.process_group  # which it replaces by the whole world
            self.power_sgd.__setstate__(dict(state))  # type: ignore[no-untyped-call]
            self.power_sgd.process_group = group
