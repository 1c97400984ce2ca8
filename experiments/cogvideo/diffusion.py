"""Diffusion that predicts velocities (Salimans and Ho 2022, arXiv:2202.00512), from pure noise (arXiv:2305.08891)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 1000
"""Noise levels: t = 0 is nearly data, t = 999 is noise and nothing else."""


class NoiseSchedule:
    """x_t = alpha_t x0 + sigma_t noise, with alpha^2 + sigma^2 = 1: a table of both, [STEPS].

    Stable Diffusion's schedule, its signal-to-noise ratio divided by `snr_shift` (more noise, for larger frames), and
    then bent so that it ends in pure noise: zero terminal SNR (arXiv:2305.08891).
    """

    def __init__(self, snr_shift: float, device: torch.device) -> None:
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=torch.float64).square()
        alpha_bar = torch.cumprod(1 - betas, dim=0)
        alpha = (alpha_bar / (snr_shift + (1 - snr_shift) * alpha_bar)).sqrt()
        alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
        self.alpha = alpha.float().to(device)
        self.sigma = (1 - alpha.square()).sqrt().float().to(device)

    def noisy(self, x0: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x_t at steps t [N], and the velocity alpha_t noise - sigma_t x0 to be learnt there."""
        alpha, sigma = (table[t].reshape(-1, *[1] * (x0.dim() - 1)) for table in (self.alpha, self.sigma))
        return alpha * x0 + sigma * noise, alpha * noise - sigma * x0


def spread_steps(n: int, device: torch.device) -> Tensor:
    """Random noise steps [n], one from each of n parts of the range: less noise in the loss than of independent draws.

    That is CogVideoX's explicit uniform sampling, within the samples of a rank.
    """
    t = (torch.arange(n, device=device) + torch.rand(n, device=device)) * (STEPS / n)
    return t.long().clamp(max=STEPS - 1)  # float32 may round a value just below STEPS up


def fixed_noise(ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Noise shaped like `like` and steps t for validation: a function of the sample's id and of nothing else."""
    noise = [torch.randn(like.shape[1:], generator=torch.Generator().manual_seed(i)) for i in ids.tolist()]
    # Multiples of the golden ratio modulo 1 are spread evenly, however many there are.
    t = (ids.cpu().double() * 0.6180339887498949 % 1 * STEPS).long()
    return torch.stack(noise).to(like.device), t.to(like.device)


def guided(net: Callable[..., Tensor], text: Tensor, weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The velocity (1 + w) v(text) - w v(no text), where zeros stand for no text: classifier-free guidance
    (arXiv:2207.12598)."""
    texts = torch.cat([text, torch.zeros_like(text)])

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        with_text, without = net(torch.cat([x, x]), torch.cat([t, t]), texts).float().chunk(2)
        return (1 + weight) * with_text - weight * without

    return velocity


@torch.no_grad()
def denoise(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, schedule: NoiseSchedule, steps: int) -> Tensor:
    """Carry noise to data by DDIM (Song et al. 2021, arXiv:2010.02502), in equal steps from t = 999.

    With alpha = cos(angle) and sigma = sin(angle), a DDIM step from one angle to another turns x towards its velocity:
    d x / d angle = velocity.
    """
    t = torch.linspace(STEPS, 0, steps + 1).round().long() - 1
    angle = torch.cat([torch.atan2(schedule.sigma, schedule.alpha).cpu(), torch.zeros(1)])[t]  # t = -1 is data
    for now, turn in zip(t.tolist(), angle.diff().tolist(), strict=False):
        v = velocity(x, torch.full((len(x),), now, device=x.device))
        x = math.cos(turn) * x + math.sin(turn) * v
    return x
