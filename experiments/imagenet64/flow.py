"""Flow matching (Lipman et al. 2022, arXiv:2210.02747): straight paths from noise to images, and a way along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchdiffeq import odeint

import jobkit
from experiments.imagenet64.unet import UNet

SOLVERS = ("euler", "midpoint", "heun2", "dopri5")

TOLERANCE = 1e-5
"""dopri5's, relative and absolute, for pixels in [-1, 1]."""


class FlowMatching:
    """Images as points x1 in [-1, 1]; the network learns the velocity at which they come from Gaussian noise x0."""

    def network(self, channels: int, classes: int, unet: DictConfig) -> UNet:
        """A network for images with so many channels; its forward takes x_t, t [N] and labels [N]."""
        return UNet(channels, classes, **unet)

    def noise(
        self, shape: Sequence[int], generator: torch.Generator | None = None, device: torch.device | None = None
    ) -> Tensor:
        """The beginnings of paths."""
        return torch.randn(shape, generator=generator, device=device)

    def path(self, image: Tensor, x0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The points x_t = (1 - t) x0 + t x1 of the paths at times t [N], and the velocity x1 - x0 to be learnt there.

        `image` is uint8 [N, C, R, R].
        """
        x1 = to_unit(image)
        t = t[:, None, None, None]
        return (1 - t) * x0 + t * x1, x1 - x0

    def error(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Mean square error [N] of the predicted velocity."""
        return (velocity.float() - target).square().flatten(1).mean(1)

    def sample(self, net: nn.Module, label: Tensor, shape: Sequence[int], p: DictConfig) -> Tensor:
        """Images, uint8 [N, *shape], of labels [N]; `p` has guidance, solver and solver_steps."""
        x0 = self.noise((len(label), *shape), device=label.device)
        velocity = guided(net, label, p.guidance)
        return to_uint8(integrate(velocity, x0, p.solver, p.solver_steps))


def random_times(n: int, device: torch.device, skewed: bool) -> Tensor:
    """Training times [n]: uniform in [0, 1], or skewed towards the data end.

    Skewed is the noise distribution of EDM (Karras et al. 2022, arXiv:2206.00364): t = 1 / (1 + sigma) with ln sigma
    normal, mean -1.2 and deviation 1.2.
    """
    if not skewed:
        return torch.rand(n, device=device)
    return 1 / (1 + torch.exp(1.2 * torch.randn(n, device=device) - 1.2))


def fixed_noise(
    ids: Tensor, shape: Sequence[int], noise: Callable[[Sequence[int], torch.Generator], Tensor]
) -> tuple[Tensor, Tensor]:
    """A method's noise [N, *shape] and times [N] for validation: a function of a sample's id and of nothing else."""
    x0, t = [], []
    for sample in ids.tolist():
        generator = torch.Generator().manual_seed(sample)  # on the CPU: the same numbers whatever the device
        x0.append(noise(shape, generator))
        t.append(torch.rand((), generator=generator))
    return torch.stack(x0).to(ids.device), torch.stack(t).to(ids.device)


def guided(net: nn.Module, label: Tensor, weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The network's output extrapolated, (1 + w) net(label) - w net(no label), as a function of x_t and t [N].

    That is classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598).
    """
    labels = torch.cat([label, torch.full_like(label, net.null_label)])

    def output(x: Tensor, t: Tensor) -> Tensor:
        with_label, without = net(torch.cat([x, x]), torch.cat([t, t]), labels).float().chunk(2)
        return (1 + weight) * with_label - weight * without

    return output


@torch.no_grad()
def integrate(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, solver: str, steps: int) -> Tensor:
    """Carry x from t = 0 (noise) to t = 1 (data).

    euler, midpoint and heun2 take `steps` equal steps; dopri5 takes as many as keep the error within TOLERANCE,
    measured over all of x.
    """
    if solver not in SOLVERS:
        raise jobkit.UsageError(f"params.solver: found {solver!r}, allowed: {', '.join(SOLVERS)}")
    if solver == "dopri5":
        options = {"dtype": torch.float32}  # of times; by default float64, which not every device has
    else:
        options = {"grid_constructor": lambda function, x, t: torch.linspace(0, 1, steps + 1).to(t)}
    ends = torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device)

    def derivative(t: Tensor, x: Tensor) -> Tensor:
        return velocity(x, t.expand(len(x)))

    return odeint(derivative, x, ends, rtol=TOLERANCE, atol=TOLERANCE, method=solver, options=options)[-1]


def to_unit(images: Tensor) -> Tensor:
    """uint8 pixels as float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """The inverse of `to_unit`; values outside are clipped."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
