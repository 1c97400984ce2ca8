"""The global norm of gradients however they are spread over the ranks, clipping, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def gradient_norm(parameters: Iterable[torch.nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm (a float32 scalar, the same on every rank) of all gradients, each element counted once.

    Gradients may be plain tensors, of which every rank has the whole, and DTensors sharded over any mesh. `stages`:
    the group of a pipeline's stages, which have parameters of their own.
    """
    squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        device = grad.device
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            if any(isinstance(placement, Partial) for placement in grad.placements):
                grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
            sharded = [i for i, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
            groups = tuple(grad.device_mesh.get_group(i) for i in sharded)
            grad = grad.to_local()
        squares[groups].append(torch.linalg.vector_norm(grad, dtype=torch.float32).square())
    total = torch.zeros((), device=device)
    for groups in sorted(squares, key=len):
        part = torch.stack(squares[groups]).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total + part
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: Tensor | float) -> None:
    """Multiply every gradient, in place."""
    by_kind: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_kind[local.device, local.dtype].append(local)
    for grads in by_kind.values():
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by, so that it becomes at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class LossScaler:
    """The factor that keeps fp16 gradients from vanishing: halved when they overflow, doubled after long quiet.

    (Micikevicius et al. 2018, arXiv:1710.03740.) torch's GradScaler looks at the gradients that one rank holds, so
    that ranks with different shards of a model would disagree about skipping a step; here the global norm decides.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self._good_steps = 0

    def accepts(self, norm: Tensor) -> bool:
        """Whether gradients of this norm may be used; adjusts the scale. Waits for the device."""
        if not math.isfinite(norm.item()):
            self.scale, self._good_steps = max(1.0, self.scale / 2), 0
            return False
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale, self._good_steps = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        """{scale, good_steps}."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a state."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
