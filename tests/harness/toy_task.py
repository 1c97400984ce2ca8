"""A training function with everything that must survive: dropout, shuffling, augmentation, AdamW, a scheduler.

Each project of a test gets a copy as its `mytask.py`. A module `orders` beside it may make a rank misbehave.
"""

import importlib.util
import os
import time

import torch
from torch import nn

orders = importlib.import_module("orders") if importlib.util.find_spec("orders") else None


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator) + 0.1 * torch.randn(8)


def train(ctx):
    model = ctx.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=ctx.params.steps)
    loader = ctx.loader(Numbers(), global_batch_size=12, num_workers=ctx.params.get("workers", 0))
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for step in ctx.steps(ctx.params.steps):
        if orders:
            orders.at_step(ctx, step)
        loss = (model(next(loader)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
        with (ctx.run_dir / f"steps_{ctx.rank}.txt").open("a") as file:
            file.write(f"{step}\n")
        time.sleep(ctx.params.get("sleep", 0.0))
    return {"final_loss": loss.item(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
