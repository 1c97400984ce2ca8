"""A progress bar of its own, with a smoothed loss and speed that only people look at.

task: sound_bar:train
params: {epochs: 3}
steps: 24
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ProgressBar:
    """Wraps an iterable; prints a bar with a smoothed loss and the speed."""

    def __init__(self, iterable, total, desc="", initial=0, smoothing=0.3, width=20, file=sys.stdout):
        self.iterable, self.total, self.desc = iterable, total, desc
        self.n = initial
        self.smoothing, self.width, self.file = smoothing, width, file
        self.start_t = self.last_t = time.time()
        self.ema_dt = None
        self.postfix = {}

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.update()
        self.close()

    def update(self, k=1):
        now = time.time()
        dt = (now - self.last_t) / k
        self.ema_dt = dt if self.ema_dt is None else self.smoothing * dt + (1 - self.smoothing) * self.ema_dt
        self.last_t = now
        self.n += k
        self.refresh()

    def set_postfix(self, **values):
        for key, value in values.items():
            old = self.postfix.get(key, value)
            self.postfix[key] = self.smoothing * value + (1 - self.smoothing) * old

    def refresh(self):
        done = int(self.width * self.n / self.total)
        words = ", ".join(f"{key}={value:.3f}" for key, value in self.postfix.items())
        speed = 1 / self.ema_dt if self.ema_dt else 0.0
        bar = "#" * done + "-" * (self.width - done)
        self.file.write(f"\r{self.desc} [{bar}] {self.n}/{self.total} {speed:.1f}it/s {words}")

    def close(self):
        self.file.write(f" ({time.time() - self.start_t:.1f}s)\n")


def train(ctx):
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in ctx.epochs(ctx.params.epochs, model=model, optimizer=optimizer):
        pbar = ProgressBar(ctx.batches(loader), total=len(loader), desc=f"epoch {epoch}", initial=ctx.batch)
        for xb, yb in pbar:
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            pbar.set_postfix(loss=loss.item())
            ctx.log({"loss": loss})
    return {"loss": loss.item()}
