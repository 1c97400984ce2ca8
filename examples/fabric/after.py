"""A script of Lightning's Fabric."""

import argparse

import lightning as L
import torch
from torch import nn

import jobkit


def make_batch(step, rank):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x + 0.1 * torch.randn(16, 8), (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    fabric = L.Fabric(accelerator="cpu", devices=args.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    state = {"model": model, "optimizer": optimizer}
    ctx = jobkit.init(params=vars(args), seed=None)
    if ctx.checkpoint is not None:
        fabric.load(ctx.checkpoint / "state.ckpt", state)

    def save(folder):
        fabric.save(folder / "state.ckpt", state)

    ctx.boundary(ctx.step, save, total=args.steps)
    for step in range(ctx.step, args.steps):
        x, y = make_batch(step, fabric.global_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        ctx.log({"train/loss": loss})
        ctx.boundary(step + 1, save, total=args.steps)

    if fabric.is_global_zero:
        torch.save(model.module.state_dict(), "weights.pt")
    ctx.finish()


if __name__ == "__main__":
    main()
