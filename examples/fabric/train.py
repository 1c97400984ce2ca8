"""A loop of Lightning's Fabric under DDP."""

import lightning as L
import torch
from torch import nn

import jobkit


def get_batch():
    x = torch.randn(16, 8)
    return x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)


def train(ctx):
    fabric = L.Fabric(accelerator="cpu", devices=ctx.world_size, strategy="ddp")
    fabric.launch()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    for _ in ctx.steps(ctx.params.steps):
        x, y = get_batch()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


if __name__ == "__main__":
    ctx = jobkit.init(params={"steps": 200})
    ctx.finish(train(ctx))
