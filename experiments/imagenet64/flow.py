"""Flow matching (Lipman et al. 2022, arXiv:2210.02747): straight paths from noise x0 to data x1, and their solvers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.imagenet64.unet import UNet

Velocity = Callable[[Tensor, Tensor], Tensor]


def interpolate(x0: Tensor, x1: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The point x_t = (1 - t) x0 + t x1 of each path at its time t [N], and the velocity x1 - x0 to be learnt there."""
    t = t.reshape(-1, *[1] * (x1.dim() - 1))
    return (1 - t) * x0 + t * x1, x1 - x0


def loss_per_sample(model: Callable[..., Tensor], x1: Tensor, label: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """Mean square error [N] of the predicted velocity."""
    x_t, velocity = interpolate(x0, x1, t)
    return (model(x_t, t, label).float() - velocity).square().flatten(1).mean(1)


def random_times(n: int, device: torch.device, skewed: bool) -> Tensor:
    """Training times [n]: uniform in [0, 1], or skewed towards the data end.

    Skewed is the noise distribution of EDM (Karras et al. 2022, arXiv:2206.00364): t = 1 / (1 + sigma) with ln sigma
    normal, mean -1.2 and deviation 1.2.
    """
    if not skewed:
        return torch.rand(n, device=device)
    return 1 / (1 + torch.exp(1.2 * torch.randn(n, device=device) - 1.2))


def fixed_noise(ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Noise x0 shaped like `like` and times t for validation: a function of the sample's id and of nothing else."""
    x0, t = [], []
    for sample in ids.tolist():
        generator = torch.Generator().manual_seed(sample)  # on the CPU: the same numbers whatever the device
        x0.append(torch.randn(like.shape[1:], generator=generator))
        t.append(torch.rand((), generator=generator))
    return torch.stack(x0).to(like.device), torch.stack(t).to(like.device)


def guided(net: UNet, label: Tensor, weight: float) -> Velocity:
    """The velocity (1 + w) v(label) - w v(no label): classifier-free guidance (arXiv:2207.12598)."""
    labels = torch.cat([label, torch.full_like(label, net.null_label)])

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        with_label, without = net(torch.cat([x, x]), torch.cat([t, t]), labels).float().chunk(2)
        return (1 + weight) * with_label - weight * without

    return velocity


@torch.no_grad()
def integrate(velocity: Velocity, x: Tensor, method: str, steps: int) -> Tensor:
    """Carry x from t = 0 (noise) to t = 1 (data) in equal steps; `method` is one of SOLVERS."""
    advance = SOLVERS[method]
    h = 1 / steps
    for i in range(steps):
        x = advance(velocity, x, torch.full((len(x),), i * h, device=x.device), h)
    return x


def _euler(velocity: Velocity, x: Tensor, t: Tensor, h: float) -> Tensor:
    return x + h * velocity(x, t)


def _midpoint(velocity: Velocity, x: Tensor, t: Tensor, h: float) -> Tensor:
    return x + h * velocity(x + h / 2 * velocity(x, t), t + h / 2)


def _heun2(velocity: Velocity, x: Tensor, t: Tensor, h: float) -> Tensor:
    first = velocity(x, t)
    return x + h / 2 * (first + velocity(x + h * first, t + h))


SOLVERS = {"euler": _euler, "midpoint": _midpoint, "heun2": _heun2}
