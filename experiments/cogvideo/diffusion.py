"""Diffusion that predicts velocities (Salimans and Ho 2022, arXiv:2202.00512), from pure noise (arXiv:2305.08891)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from jobkit.train.order import share_of

STEPS = 1000
"""Noise levels: t = 0 is nearly data, t = 999 is noise and nothing else."""

Velocity = Callable[[Tensor, Tensor], Tensor]


class NoiseSchedule:
    """x_t = alpha_t x0 + sigma_t noise, with alpha^2 + sigma^2 = 1: a table of both.

    Stable Diffusion's schedule, its signal-to-noise ratio divided by `snr_shift` (more noise, for larger frames), and
    then bent so that it ends in pure noise: zero terminal SNR (Lin et al. 2023, arXiv:2305.08891).
    """

    def __init__(self, snr_shift: float, device: torch.device | None = None) -> None:
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=torch.float64).square()
        alpha_bar = torch.cumprod(1 - betas, dim=0)
        alpha_bar = alpha_bar / (snr_shift + (1 - snr_shift) * alpha_bar)
        alpha = alpha_bar.sqrt()
        alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
        self.alpha = alpha.float().to(device)
        self.sigma = (1 - alpha.square()).sqrt().float().to(device)

    def noisy(self, x0: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x_t at steps t [N], and the velocity alpha_t noise - sigma_t x0 to be learnt there."""
        alpha, sigma = (table[t].reshape(-1, *[1] * (x0.dim() - 1)) for table in (self.alpha, self.sigma))
        return alpha * x0 + sigma * noise, alpha * noise - sigma * x0


def spread_steps(batch: int, rank: int, world_size: int, device: torch.device) -> Tensor:
    """Random noise steps [n] for a rank's n samples of a global batch, one from each of `batch` parts of the range.

    The ranks' parts interleave, and together are all of them, also where ranks have unequally many samples.
    CogVideoX's explicit uniform sampling: less noise in the loss than independent draws have.
    """
    share, all_have = share_of(batch, rank, world_size), batch // world_size
    n = share.stop - share.start
    parts = torch.arange(n, device=device) * world_size + rank
    # A sample more than other ranks have: behind those that all have, and those of the ranks before.
    parts[all_have:] = all_have * world_size + share.start - rank * all_have
    t = ((parts + torch.rand(n, device=device)) * (STEPS / batch)).long()
    return t.clamp(max=STEPS - 1)  # a float32 just below 1, added to a whole number, may be rounded up


def fixed_noise(ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Noise shaped like `like` and steps t for validation: a function of the sample's id and of nothing else."""
    noise = [torch.randn(like.shape[1:], generator=torch.Generator().manual_seed(one)) for one in ids.tolist()]
    # Multiples of the golden ratio modulo 1 are spread evenly, however many there are.
    t = (ids.cpu().double() * 0.6180339887498949 % 1 * STEPS).long()
    return torch.stack(noise).to(like.device), t.to(like.device)


def guided(net: Callable[..., Tensor], text: Tensor, weight: float) -> Velocity:
    """The velocity (1 + w) v(text) - w v(no text): classifier-free guidance (arXiv:2207.12598)."""
    texts = torch.cat([text, no_text(text)])

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        with_text, without = net(torch.cat([x, x]), torch.cat([t, t]), texts).float().chunk(2)
        return (1 + weight) * with_text - weight * without

    return velocity


def no_text(text: Tensor) -> Tensor:
    """What stands for a text that is not given: zeros."""
    return torch.zeros_like(text)


@torch.no_grad()
def denoise(velocity: Velocity, noise: Tensor, schedule: NoiseSchedule, steps: int) -> Tensor:
    """Carry noise to data by DDIM (Song et al. 2021, arXiv:2010.02502), in equal steps from t = 999.

    With alpha = cos(angle) and sigma = sin(angle) data and noise behind x follow from x and its velocity, and to go to
    another angle with both kept is to turn x towards its velocity: the flow dx / d angle = velocity, to first order.
    """
    t = torch.linspace(STEPS, 0, steps + 1).round().long() - 1
    angle = torch.atan2(schedule.sigma.cpu(), schedule.alpha.cpu())
    angle = torch.cat([angle, torch.zeros(1)])[t]  # t = -1, the last, is data
    x = noise
    for now, turn in zip(t.tolist(), angle.diff().tolist(), strict=False):
        v = velocity(x, torch.full((len(x),), now, device=x.device))
        x = math.cos(turn) * x + math.sin(turn) * v
    return x
