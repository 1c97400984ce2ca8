"""A denoiser with a Trainer whose batches never end: `cycle(loader)` in public code, ctx.loader here.

params: {train_num_steps: 60}
config: {verify: {params: {train_num_steps: 20}}}
forgotten: trainer.dl
type: ctx.loader
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset  # forgets: from torch.utils.data import DataLoader, Dataset

import jobkit


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        yield from dl


class Spirals(Dataset):
    def __init__(self, n=240):
        t = torch.linspace(0.5, 3.0, n)
        self.points = torch.stack([t * (4 * t).cos(), t * (4 * t).sin()], 1) / 3

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index]


class GaussianDiffusion(nn.Module):
    def __init__(self, timesteps=50):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))
        self.num_timesteps = timesteps
        betas = torch.linspace(1e-3, 0.1, timesteps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1.0 - betas, dim=0))

    def forward(self, x):
        t = torch.randint(0, self.num_timesteps, (len(x),))
        noise = torch.randn_like(x)
        a = self.alphas_cumprod[t][:, None]
        x_t = a.sqrt() * x + (1 - a).sqrt() * noise
        pred = self.model(torch.cat([x_t, t[:, None] / self.num_timesteps], 1))
        return F.mse_loss(pred, noise)


class Trainer:
    def __init__(self, ctx, diffusion_model, dataset, *, bs=32, train_lr=1e-3, train_num_steps=1000):
        self.ctx = ctx
        self.model = diffusion_model
        self.train_num_steps = train_num_steps
        dl = ctx.loader(dataset, global_batch_size=bs)  # forgets: dl = DataLoader(dataset, bs, shuffle=True)
        ctx.track(dl=dl)  # forgets
        self.dl = cycle(dl)
        self.opt = torch.optim.Adam(diffusion_model.parameters(), lr=train_lr, betas=(0.9, 0.99))
        self.step = 0

    def train(self):
        self.ctx.track(model=self.model, opt=self.opt)
        self.step = self.ctx.step
        while self.step < self.train_num_steps:
            self.ctx.boundary(self.step, total=self.train_num_steps)
            loss = self.model(next(self.dl))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.ctx.log({"loss": loss})
            self.step += 1
        self.ctx.boundary(self.step, total=self.train_num_steps)
        print("training complete")


if __name__ == "__main__":
    ctx = jobkit.init(params={"train_num_steps": 60})
    trainer = Trainer(ctx, GaussianDiffusion(), Spirals(), train_num_steps=ctx.params.train_num_steps)
    trainer.train()
    ctx.finish()
