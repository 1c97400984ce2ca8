"""A training function that every strategy of `parallel:` spreads: blocks with dropout, averages, an evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import jobkit

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(4)])

    def tensor_plan(self) -> dict[str, Any]:
        return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def train(ctx: jobkit.Context) -> dict[str, float]:
    x = torch.rand(96, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sin())
    model = ctx.parallelize(Net())
    optimizer = ctx.optimizer(model, jobkit.optim.EmaAdamW, lr=0.01)
    scheduler = jobkit.schedule.cosine(optimizer, steps=ctx.params.steps, warmup=2)
    loader = ctx.loader(data, global_batch_size=16)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def error(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    def validate() -> dict[str, float]:
        with torch.no_grad(), ctx.evaluating(model, optimizer):
            return {"validation/loss": ctx.evaluate(error, data, batch_size=10)}

    for _ in ctx.steps(ctx.params.steps, every={validate: 5}):
        loss = ctx.backward(model, next(loader), nn.functional.mse_loss)
        ctx.update(optimizer, max_norm=0.5)
        scheduler.step()
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}
