"""Gradients that the next step adds to: where an optimizer steps only now and then, they are state as weights are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from jobkit.errors import UsageError
from jobkit.train.names import named_parameters
from jobkit.train.optimizer_state import laid_out_as, parameters_of


class PendingGradients:
    """Tells gradients that are still needed from those that an optimizer has used.

    A used one is still needed where nobody sets it to None before the next backward pass adds to it. So used ones count
    as pending until a step has been seen to begin with new ones.
    """

    def __init__(self) -> None:
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        """The gradient that an optimizer has used last, and the changes torch had counted for it."""
        self._are_set_to_none: dict[torch.optim.Optimizer, bool] = {}
        """Whether an optimizer's used gradients are replaced by new ones; unknown before its second step."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer uses, from its next step on."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        known = [(self._used[p][0](), p.grad) for p in parameters_of(optimizer) if p in self._used]
        if known and self._are_set_to_none.get(optimizer, True):  # one step that adds to used ones is enough
            self._are_set_to_none[optimizer] = all(used is None or used is not now for used, now in known)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        settled = self._are_set_to_none.get(optimizer, False)
        for parameter in parameters_of(optimizer):
            if (gradient := parameter.grad) is not None:
                self._used[parameter] = (weakref.ref(gradient), gradient._version if settled else -1)

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """The gradients that the next step may add to, by the parameter's name.

        UsageError where ranks have yet to add them up: those are in no place from which they can be read.
        """
        for part in module.modules():
            if isinstance(part, FSDPModule) and _has_unshared(part):
                raise UsageError(
                    "a step ends with gradients that the ranks have not added up, of which a checkpoint cannot be "
                    "taken: call set_requires_gradient_sync(True) for the last backward pass of each step, or let "
                    "ctx.backward divide the batch"
                )
        parameters = named_parameters(module)
        pending = {name: p.grad for name, p in parameters.items() if p.grad is not None and not self._is_used(p)}
        # Sparse ones have other sizes on each rank, and can be added to as dense ones.
        return {name: one.to_dense() if one.is_sparse else one for name, one in pending.items()}

    def _is_used(self, parameter: nn.Parameter) -> bool:
        used = self._used.get(parameter)
        gradient = parameter.grad
        return used is not None and gradient is not None and used[0]() is gradient and used[1] == gradient._version


def _has_unshared(part: FSDPModule) -> bool:
    group = part._get_fsdp_state()._fsdp_param_group
    return group is not None and any(one.unsharded_accumulated_grad is not None for one in group.fsdp_params)


def checksums(gradients: Mapping[str, Tensor]) -> list[int]:
    """A number for each gradient, equal for equal bits; 0 for a DTensor, which is a part on each rank."""
    found = [_bits(gradient.detach()).sum(dtype=torch.int64) for gradient in gradients.values()]
    return [int(one) for one in found]


def _bits(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        return torch.zeros(1)
    gradient = gradient.resolve_conj().resolve_neg()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return gradient.view(integers[gradient.itemsize])


def set_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Give the parameters of a module these gradients by name, and none to the others that are not spread."""
    for name, parameter in named_parameters(module).items():
        if name in gradients:
            gradient = gradients[name]
            whole = gradient if isinstance(gradient, DTensor) else gradient.to(parameter.device)
            parameter.grad = laid_out_as(parameter, whole)
        elif not isinstance(parameter, DTensor):
            parameter.grad = None
