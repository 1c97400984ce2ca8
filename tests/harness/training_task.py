"""The training function of tests about interruptions: small, with all that an exact restart has to carry over.

Its result has a digest of all weights and of the optimizer's state, so that runs are compared to the last bit.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import jobkit

SAMPLES = 960
"""Of `train_dealt`: more than it takes in the time in which a test stops it."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a function, with noise that is drawn when a sample is loaded."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / 96, (index % 7) / 7]) + 0.01 * torch.rand(2) + 0.001 * random.random()
        return x, x.sin().sum(0, keepdim=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def digest(*states: Any) -> str:
    """Return a digest of all tensors in some state_dicts, in order."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for item in value.values():
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)

    for state in states:
        add(state)
    return total.hexdigest()[:16]


def mark(ctx: jobkit.Context) -> None:
    """Leave this rank's process id, for a test that kills it."""
    folder = ctx.run_dir / "outputs" / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(ctx.rank)).write_text(f"{ctx.attempt} {os.getpid()}")


def pause(ctx: jobkit.Context) -> None:
    """Give a test the time to interrupt: `step_seconds` in each step, before the attempt that it lets finish."""
    if ctx.attempt < ctx.params.get("last_attempt", 1000):
        time.sleep(ctx.params.get("step_seconds", 0.0))


def train(ctx: jobkit.Context) -> dict[str, Any]:
    mark(ctx)
    p = ctx.params
    model = ctx.parallelize(network())
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=p.get("lr", 0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader = ctx.loader(Points(), global_batch_size=p.get("batch", 16))
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    state = ctx.values(average=0.0, seen=torch.zeros(4), counts={10: 1, 9: 2})

    def error(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        time.sleep(p.get("sample_seconds", 0.0))
        return (model(batch[0]) - batch[1]).square().mean(1)

    def validate() -> dict[str, float]:
        with ctx.evaluating(model):
            return {"validation/loss": ctx.evaluate(error, Points(), batch_size=8)}

    for step in ctx.steps(p.steps, every={validate: p.get("validate_every", 20)}):
        batch = next(loader)
        loss = ctx.backward(model, batch, nn.functional.mse_loss, micro_batch_size=4)
        ctx.update(optimizer, max_norm=0.5)
        scheduler.step()
        state.average = 0.9 * state.average + 0.1 * loss.item()
        state.seen[step % 4] += batch[0].sum().item()
        state.counts[10] += 1
        ctx.log({"train/loss": loss, "train/average": state.average})
        pause(ctx)
    weights = digest(model.state_dict(), optimizer.state_dict()["state"])
    return {"digest": weights, "average": state.average, "lr": optimizer.param_groups[0]["lr"]}


def train_epochs(ctx: jobkit.Context) -> dict[str, Any]:
    """The same with a DataLoader of the script's own, whose order and noise come from torch's generator."""
    mark(ctx)
    p = ctx.params
    model = ctx.parallelize(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    workers = p.get("workers", 0)
    for epoch in ctx.epochs(p.epochs, model=model, optimizer=optimizer):
        torch.rand(3)  # lines above the batches run again within an epoch
        loader = DataLoader(Points(), batch_size=8, sampler=RandomSampler(Points()), num_workers=workers)
        for x, y in ctx.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            ctx.log({"train/loss": loss})
            pause(ctx)
        ctx.log({"train/epoch": epoch})
    return {"digest": digest(model.state_dict(), optimizer.state_dict()["state"])}


def train_dealt(ctx: jobkit.Context) -> dict[str, Any]:
    """An epoch over samples that DistributedSampler deals out to the ranks, each written down."""
    model = ctx.parallelize(network())
    data = list(range(SAMPLES))
    sampler: DistributedSampler[int] = DistributedSampler(data, ctx.world_size, ctx.rank)  # type: ignore[arg-type]
    folder = ctx.run_dir / "outputs" / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{ctx.attempt}-{ctx.rank}").open("w") as file:
        for _ in ctx.epochs(1, model=model):
            for batch in ctx.batches(DataLoader(data, batch_size=8 // ctx.world_size, sampler=sampler)):  # type: ignore[arg-type]
                file.write("".join(f"{sample}\n" for sample in batch.tolist()))
                file.flush()
                pause(ctx)
    return {"batch": ctx.batch}
