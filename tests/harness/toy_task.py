"""A training function with everything that must survive: dropout, shuffling, augmentation, AdamW, a scheduler.

Each project of a test gets a copy as its `mytask.py`. A module `orders` beside it may make a rank misbehave.
"""

import importlib.util
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

orders = importlib.import_module("orders") if importlib.util.find_spec("orders") else None


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator) + 0.1 * torch.randn(8)


def train(ctx):
    dropout = nn.Dropout(ctx.params.get("dropout", 0.1))
    model = ctx.parallelize(nn.Sequential(nn.Linear(8, 32), dropout, nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=ctx.params.steps)
    workers = {"num_workers": ctx.params.get("workers", 0), "multiprocessing_context": ctx.params.get("started_by")}
    loader = ctx.loader(Numbers(), global_batch_size=12, **workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    if hasattr(orders, "before_loop"):
        orders.before_loop(ctx)
    for step in ctx.steps(ctx.params.steps):
        ids, x = next(loader)
        with (ctx.run_dir / f"steps_{ctx.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"attempt": ctx.attempt, "step": step, "ids": ids.tolist()}) + "\n")
        if orders:
            orders.at_step(ctx, step)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if ctx.world_size > 1:
            dist.all_reduce(total)
        ctx.log({"train/loss": total / ctx.world_size})
        time.sleep(ctx.params.get("sleep", 0.0))
    steps = int(optimizer.state[next(iter(model.parameters()))]["step"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"final_loss": loss.item(), "optimizer_steps": steps, "visible": visible}
