"""Training functions that forget something, for `jobkit verify`; each is named after what it forgets."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training_task import Points

import jobkit

DRAWN_AT_IMPORT = random.random()

DATA = TensorDataset(torch.linspace(0, 1, 64)[:, None], torch.linspace(0, 1, 64)[:, None].sin())


def train(ctx: jobkit.Context) -> dict[str, Any]:
    forgets = ctx.params.forgets
    model = ctx.parallelize(nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = ctx.loader(DATA, global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    if forgets != "scheduler":
        ctx.track(scheduler=scheduler)
    average, worst = 0.0, 0.0
    if file := ctx.params.get("file"):
        Path(file).write_text("loss\n")
        tempfile.TemporaryFile(dir=Path(file).parent).close()  # it never has a name
    for patience, _ in enumerate(ctx.steps(ctx.params.steps)):
        x, y = next(loader)
        if forgets == "random at import":
            x = x + DRAWN_AT_IMPORT
        loss = ctx.backward(model, (x, y), nn.functional.mse_loss)
        if forgets == "moving average":
            average = 0.9 * average + 0.1 * loss.item()
            loss = loss + average
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"train/loss": loss})
        worst = max(worst, loss.item())
        if forgets == "patience" and patience == 10:
            break
    return {"worst": worst} if forgets == "result" else {}


def train_teacher(ctx: jobkit.Context) -> dict[str, Any]:
    """With `weights: trainable` nothing of a teacher is forgotten that is a model of its own; that of a model with
    trained parts is."""
    model = ctx.parallelize(nn.Linear(1, 1))
    teacher = nn.Linear(1, 1).requires_grad_(False)
    if ctx.params.forgets == "teacher":
        model.teacher = teacher
    else:
        ctx.track(teacher=teacher)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(ctx.params.steps):
        ctx.backward(model, DATA[:8], nn.functional.mse_loss, global_batch_size=8)
        ctx.update(optimizer)
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.1)
    return {}


def train_average(ctx: jobkit.Context) -> dict[str, Any]:
    """An average of the weights, which nothing reads in the training."""
    model = ctx.parallelize(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    ema = AveragedModel(model)
    if ctx.params.forgets != "ema":
        ctx.track(ema=ema)
    for _ in ctx.steps(ctx.params.steps):
        loss = ctx.backward(model, DATA[:12], nn.functional.mse_loss, global_batch_size=12 * ctx.world_size)
        ctx.update(optimizer)
        ema.update_parameters(model)
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


def track_in_turn(ctx: jobkit.Context) -> dict[str, Any]:
    """Nothing is forgotten: the scheduler, made after its optimizer was restored, has changed the learning rate."""
    model = ctx.parallelize(nn.Linear(1, 1))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    ctx.track(scheduler=scheduler)
    for _ in ctx.steps(ctx.params.steps):
        loss = ctx.backward(model, DATA[:8], nn.functional.mse_loss, global_batch_size=8)
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"lr": optimizer.param_groups[0]["lr"], "train/loss": loss})
    return {}


class Growing(nn.Module):
    """An average that begins as None, and a bank that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.at_times = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", None)
        self.register_buffer("bank", torch.empty(0, 1))

    def forward(self, x: torch.Tensor, is_even: bool) -> torch.Tensor:
        mean = x.mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        self.bank = torch.cat([self.bank, x[:1].detach()])
        x = x - self.mean + 0.01 * self.bank.mean()
        return self.layers(self.at_times * x if is_even else x)


def train_parts(ctx: jobkit.Context) -> dict[str, Any]:
    """Nothing is forgotten: objects tracked in turn, a parameter that some steps use, whose gradient is zero in others;
    an optimizer that steps more rarely, a layer that is trained later, buffers that training makes, values of other
    kinds than at first."""
    first, second = Growing(), ctx.parallelize(nn.Linear(1, 1))
    for parameter in first.layers[0].parameters():
        parameter.requires_grad_(False)
    often, rarely = torch.optim.AdamW(first.parameters()), torch.optim.Adam(second.parameters())
    ctx.track(rarely=rarely)
    ctx.track(first=first)
    ctx.track(often=often, second=second)
    state = ctx.values(sums={"loss": torch.zeros(()), "steps": []}, total=torch.zeros(()), best=None)
    x, y = DATA.tensors
    for step in ctx.steps(ctx.params.steps):
        for parameter in first.layers[0].parameters() if step >= 5 else ():
            parameter.requires_grad_(True)
        often.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(first(x, step % 2 == 0) + second(x).detach(), y)
        loss.backward()
        often.step()
        if step % 3 == 2:
            rarely.zero_grad()
            nn.functional.mse_loss(second(x), y).backward()
            rarely.step()
        state.sums["loss"] += loss.detach()
        state.sums["steps"].append(step)
        state.total = state.total + loss.detach().double()
        state.best = loss.detach() if state.best is None else torch.minimum(state.best, loss.detach())
        ctx.log({"train/loss": loss, "train/total": state.total, "train/sum": state.sums["loss"]})
    return {"best": state.best.item()}


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points in shards, with noise; it goes on from its state."""

    num_shards, place = 4, 0

    def __init__(self, samples: range = range(96)) -> None:
        self.samples = samples

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.samples[index::num_shards])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        points = Points()
        while self.place < len(self.samples):
            self.place += 1
            yield points[self.samples[self.place - 1]]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def train_epochs(ctx: jobkit.Context) -> dict[str, Any]:
    """Nothing is forgotten: persistent workers, beside them a stream; lines at an epoch's top that draw and count."""
    model = ctx.parallelize(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    generator, state = torch.Generator().manual_seed(7), ctx.values(scale=1.0)
    for _ in ctx.epochs(100, model=model, optimizer=optimizer, generator=generator):
        state.scale *= 0.9
        offset = state.scale * torch.rand(1, generator=generator)
        for (x, y), (noise, _) in ctx.batches(loader, DataLoader(Stream(), batch_size=8)):
            x = x + 0.01 * noise + offset
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


def train_stream(ctx: jobkit.Context) -> dict[str, Any]:
    """Nothing is forgotten: a stream of ctx.loader whose shards the ranks divide, and one that is read again."""
    model = ctx.parallelize(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = jobkit.optim.EmaAdamW(model.parameters(), lr=0.01)
    stream = ctx.loader(Stream(), global_batch_size=8, num_workers=1)
    other = ctx.loader(Once(), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, stream=stream, other=other)

    def validate() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            return {"validation/loss": ctx.evaluate(lambda batch, ids: model(batch[0])[:, 0], Points(), batch_size=10)}

    for _ in ctx.steps(ctx.params.steps, every={validate: 20}):
        (x, y), (noise, _) = next(stream), next(other)
        loss = ctx.backward(model, (x + 0.01 * noise, y), nn.functional.mse_loss, global_batch_size=8)
        ctx.update(optimizer)
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


def train_own_ddp(ctx: jobkit.Context) -> dict[str, Any]:
    """Nothing is forgotten: DDP of the function's own, of which it tracks the model within; two batches an update."""
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader = DataLoader(Points(), batch_size=8, shuffle=True)  # each rank draws an order of its own
    for _ in ctx.epochs(100, model=model, optimizer=optimizer):
        for x, y in ctx.batches(loader):
            is_update = ctx.step % 2 == 1
            with nullcontext() if is_update else ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(x), y)
                loss.backward()
            if is_update:
                optimizer.step()
                optimizer.zero_grad()
            ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


class Once(IterableDataset[Any]):
    """All points in an order of its own, from their beginning on."""

    def __iter__(self) -> Iterator[Any]:
        points = Points()
        return (points[index] for index in random.sample(range(96), 50))
