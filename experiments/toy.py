"""A small training run that uses most of jobkit: a network learns a function from made data in a second."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import jobkit


def data(samples: int, seed: int) -> TensorDataset:
    """Points in [-1, 1]^2 and the function that is to be learnt."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(points, torch.sin(3 * points[:, :1]) * points[:, 1:])


def train(ctx: jobkit.Context) -> dict[str, float]:
    p = ctx.params
    model = ctx.parallelize(nn.Sequential(nn.Linear(2, p.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(p.width, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=p.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, p.steps)
    loader = ctx.loader(data(1000, seed=0), global_batch_size=p.batch)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    held_out = data(200, seed=1)

    def error(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    def validate() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            return {"validation/loss": ctx.evaluate(error, held_out, batch_size=50)}

    for _ in ctx.steps(p.steps, every={validate: p.validate_every}):
        loss = ctx.backward(model, next(loader), nn.functional.mse_loss)
        ctx.update(optimizer, max_norm=1.0)
        scheduler.step()
        ctx.log({"train/loss": loss})
        time.sleep(p.step_seconds)
    return {"loss": loss.item()}
