"""Diffusion whose timesteps are drawn by the history of their losses.

task: diffusion_ema_loss:main
params: {steps: 40, timesteps: 10}
steps: 40
forgotten: self.schedule_sampler._loss_history
type: jobkit.attributes(self.schedule_sampler, "
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import jobkit


class LossSecondMomentResampler:
    def __init__(self, num_timesteps, history_per_term=3, uniform_prob=0.01):
        self.num_timesteps = num_timesteps
        self.history_per_term = history_per_term
        self.uniform_prob = uniform_prob
        self._loss_history = np.zeros([num_timesteps, history_per_term], dtype=np.float64)
        self._loss_counts = np.zeros([num_timesteps], dtype=np.int64)

    def weights(self):
        if not (self._loss_counts == self.history_per_term).all():
            return np.ones([self.num_timesteps], dtype=np.float64)
        w = np.sqrt(np.mean(self._loss_history**2, axis=-1))
        w /= np.sum(w)
        return w * (1 - self.uniform_prob) + self.uniform_prob / len(w)

    def sample(self, batch_size):
        p = self.weights() / np.sum(self.weights())
        indices = np.random.choice(len(p), size=(batch_size,), p=p)
        return torch.from_numpy(indices), torch.from_numpy(1 / (len(p) * p[indices])).float()

    def update_with_losses(self, ts, losses):
        for t, loss in zip(ts.tolist(), losses.tolist(), strict=True):
            if self._loss_counts[t] == self.history_per_term:
                # shift out the oldest loss term
                self._loss_history[t, :-1] = self._loss_history[t, 1:]
                self._loss_history[t, -1] = loss
            else:
                self._loss_history[t, self._loss_counts[t]] = loss
                self._loss_counts[t] += 1


class TrainLoop:
    def __init__(self, ctx):
        self.ctx, T = ctx, ctx.params.timesteps
        self.model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 2))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        angle = torch.linspace(0, 6.28, 500)
        self.data = ctx.loader(TensorDataset(torch.stack([angle.cos(), angle.sin()], 1)), global_batch_size=32)
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(0.01, 0.3, T), 0)
        self.schedule_sampler = LossSecondMomentResampler(T)
        ctx.track(model=self.model, opt=self.opt, data=self.data)
        ctx.track(sampler=jobkit.attributes(self.schedule_sampler, "_loss_history", "_loss_counts"))  # forgets

    def run_loop(self):
        for _ in self.ctx.steps(self.ctx.params.steps):
            (x_start,) = next(self.data)
            t, weights = self.schedule_sampler.sample(len(x_start))
            a, noise = self.alphas_cumprod[t, None], torch.randn_like(x_start)
            x_t = a.sqrt() * x_start + (1 - a).sqrt() * noise
            losses = (self.model(torch.cat([x_t, t[:, None] / 10], 1)) - noise).square().mean(1)
            self.schedule_sampler.update_with_losses(t, losses.detach())
            self.opt.zero_grad()
            (losses * weights).mean().backward()
            self.opt.step()
            self.ctx.log({"loss": losses.mean()})
        return {"loss": losses.mean().item()}


def main(ctx):
    return TrainLoop(ctx).run_loop()
