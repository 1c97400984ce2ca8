"""The training function of tests on a GPU: convolutions, dropout, averages of weights, an evaluation, accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training_task import digest, mark, pause

import jobkit
from jobkit.optim import EmaAdamW


def network() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(512, 4)).to(memory_format=torch.channels_last)


def train(ctx: jobkit.Context) -> dict[str, Any]:
    mark(ctx)
    p = ctx.params
    assert ctx.device.type == "cuda", ctx.device
    model = ctx.parallelize(network())
    optimizer = ctx.optimizer(model, EmaAdamW, lr=1e-2)
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 4)
    loader = ctx.loader(data, global_batch_size=16, num_workers=p.get("workers", 0))
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    forward = torch.compile(model) if p.get("compile") else model

    def errors(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images + torch.rand_like(images)), labels, reduction="none")

    def validate() -> dict[str, float]:
        with ctx.averaged(optimizer), ctx.evaluating(model):
            return {"validation/loss": ctx.evaluate(errors, data, batch_size=16)}

    state = ctx.values(done=torch.zeros((), device=ctx.device), sums={})
    for _ in ctx.steps(p.steps, every={validate: 10}):
        images, labels = next(loader)
        images = images + 0.1 * torch.randn_like(images)  # the device's generator
        loss = ctx.backward(forward, (images, labels), F.cross_entropy, micro_batch_size=8)
        ctx.update(optimizer, max_norm=1.0)
        ctx.log({"train/loss": loss, "train/done": state.done})
        state.done += 1  # the value was logged, not the tensor
        state.sums["loss"] = state.sums.get("loss", 0.0) + loss  # on the device in each attempt
        pause(ctx)
    averages = [state["ema"] for state in optimizer.state.values()]
    return {"digest": digest(model.state_dict(), averages), "loss": loss.item(), "sum": state.sums["loss"].item()}


def train_on_two(ctx: jobkit.Context) -> dict[str, Any]:
    """Train a model whose second half, with its dropout, is on this rank's second device."""
    mark(ctx)
    first, second = ctx.device, torch.device("cuda", (ctx.device.index or 0) + 1)
    front = nn.Linear(32, 64).to(first)
    back = nn.Sequential(nn.Dropout(0.3), nn.Linear(64, 4)).to(second)
    optimizer = torch.optim.AdamW([*front.parameters(), *back.parameters()], lr=1e-2)
    ctx.track(front=front, back=back, optimizer=optimizer)
    for step in ctx.steps(ctx.params.steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(first)
        loss = back(front(x).to(second)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
        pause(ctx)
    return {"digest": digest(front.state_dict(), back.state_dict()), "loss": loss.item()}


def train_and_look(ctx: jobkit.Context) -> dict[str, Any]:
    """Return, of each rank, the devices on which it has no CUDA context."""
    result = train(ctx)
    assert result["digest"]
    without = [number for number in range(ctx.world_size) if not torch._C._cuda_hasPrimaryContext(number)]
    every: list[Any] = [None] * ctx.world_size
    torch.distributed.all_gather_object(every, without)
    return {"others": every}
