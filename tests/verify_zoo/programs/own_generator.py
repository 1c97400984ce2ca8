"""A denoising autoencoder whose noise comes from a torch.Generator of its own.

task: own_generator:train
params: {steps: 30, sigma: 0.3}
steps: 24
forgotten: noise_rng
type: ctx.track(noise_rng=noise_rng)
"""

import math

import torch
from torch import nn
from torch.utils.data import Dataset


class Waves(Dataset):
    """Sine waves of random phases; item i is always the same wave."""

    def __init__(self, n=256, length=16):
        self.t = torch.linspace(0, 2 * math.pi, length)
        self.phases = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 2 * math.pi

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, i):
        return torch.sin(self.t + self.phases[i])


def add_noise(clean, sigma, generator):
    noise = torch.randn(clean.shape, generator=generator).to(clean.device)
    mask = torch.rand(clean.shape, generator=generator).to(clean.device) > 0.1
    return (clean + sigma * noise) * mask


def train(ctx):
    p = ctx.params
    net = ctx.parallelize(nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 16)))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = ctx.loader(Waves(), global_batch_size=32)
    noise_rng = torch.Generator().manual_seed(ctx.seed + 1000 * ctx.rank)
    ctx.track(net=net, opt=opt, loader=loader)
    ctx.track(noise_rng=noise_rng)  # forgets
    for step in ctx.steps(p.steps):
        clean = next(loader)
        noisy = add_noise(clean, p.sigma, noise_rng)
        loss = ctx.backward(net, (noisy, clean), nn.functional.mse_loss)
        ctx.update(opt)
        ctx.log({"mse": loss})
        if step % 10 == 0:
            print(f"[{step}/{p.steps}] mse {loss.item():.4f}")
    return {"mse": loss.item()}
