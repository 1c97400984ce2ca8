"""Compressed gradients: less to send in each step of DDP. parallelizer.py makes one for each DDP module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from jobkit.config.schema import CommConfig

MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict", "iter")
"""The state of PowerSGD: each rank's parts of gradients that it has not sent yet."""


class Compression:
    """The hook on a DDP module that compresses its gradients, and the memory of PowerSGD as a part of the checkpoint.

    PowerSGD (arXiv:1905.13727) sends an approximation of a low rank and adds the error to the next step's gradients.
    """

    def __init__(self, model: DistributedDataParallel, comm: CommConfig) -> None:
        self._device = next(model.parameters()).device
        self._power_sgd: powerSGD_hook.PowerSGDState | None = None
        if comm.hook == "powersgd":
            self._power_sgd = powerSGD_hook.PowerSGDState(
                model.process_group, matrix_approximation_rank=comm.powersgd_rank, start_powerSGD_iter=10
            )
            model.register_comm_hook(self._power_sgd, powerSGD_hook.powerSGD_hook)
        else:
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            model.register_comm_hook(model.process_group, hooks[comm.hook])

    def state_dict(self) -> dict[str, Any]:
        if self._power_sgd is None:
            return {}
        return {**{key: getattr(self._power_sgd, key) for key in MEMORY}, "rng": self._power_sgd.rng.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._power_sgd is None or not state:
            return
        for key in MEMORY:
            value = state[key]
            if isinstance(value, dict):
                value = {number: tensor.to(self._device) for number, tensor in value.items()}
            setattr(self._power_sgd, key, value)
        self._power_sgd.rng.set_state(state["rng"])
