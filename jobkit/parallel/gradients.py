"""The global norm of gradients on any spread of a model, clipping, and the loss scale of fp16. step.py calls it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm


def gradient_norm(
    parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the 2-norm (a float32 scalar, the same on every rank) of all gradients, each element counted once.

    Gradients may be plain tensors, of which every rank has the whole, and DTensors over any mesh. `stages`: the group
    of a pipeline's stages, which have parameters of their own. A stage without gradients adds a zero on `device`, its
    first parameter's by default.
    """
    parameters = list(parameters)
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local, groups = _shard(parameter.grad)
            if local.dtype.itemsize < 4:  # get_total_norm rounds each norm to the gradient's type: fp16 ends at 65504
                local = torch.linalg.vector_norm(local, dtype=torch.float32)
            shards[groups].append(local)
    total = torch.zeros((), device=device or (parameters[0].device if parameters else None))
    for groups, tensors in shards.items():
        # Of DTensors get_total_norm would sum once for each tensor and mesh axis; of their shards once for each axis.
        part = get_total_norm(tensors).float().square()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total.to(part.device) + part
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _shard(gradient: Tensor) -> tuple[Tensor, tuple[dist.ProcessGroup, ...]]:
    """Return this rank's part of a gradient, and the groups of ranks that it is divided over."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    gradient = gradient.redistribute(placements=placements)
    divided = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return gradient.to_local(), tuple(gradient.device_mesh.get_group(axis) for axis in divided)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of the global norm `norm`, in place, so that it becomes at most `max_norm`."""
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as torch's clip_grads_with_norm_


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient, in place.

    Each rank scales its own part: for a large list of DTensors torch would take seconds to work out the placements.
    """
    on_device: dict[torch.device, list[Tensor]] = defaultdict(list)  # torch takes no list of several, and no empty one
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            on_device[grad.device].append(grad.to_local() if isinstance(grad, DTensor) else grad)
    for device, gradients in on_device.items():
        torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)


class LossScaler:
    """The factor that keeps fp16 gradients from vanishing: halved when they overflow, doubled after long quiet.

    (Micikevicius et al. 2018, arXiv:1710.03740.) torch's GradScaler looks at the gradients that one rank holds, so
    that ranks with different shards of a model would disagree about skipping a step; here the global norm decides.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.used = 1.0
        """The factor that the present gradients have been multiplied by."""
        self._good_steps = 0

    def begin(self, pending: Callable[[], bool]) -> float:
        """Return the factor for the next gradients: the present scale, unless they are added to `pending` ones."""
        if self.used != self.scale and not pending():
            self.used = self.scale
        return self.used

    def accepts(self, norm: Tensor) -> bool:
        """Return whether gradients of this norm may be used; adjusts the scale. Waits for the device."""
        if not math.isfinite(norm.item()):
            self.scale, self._good_steps = max(1.0, self.scale / 2), 0
            return False
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale, self._good_steps = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "used": self.used, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self.used = float(state["used"])
