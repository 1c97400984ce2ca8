"""Class-conditional flow matching on ImageNet 64 x 64, or on handwritten digits where there is no ImageNet.

    python -m jobkit.submit experiments/imagenet64.yaml --local

`train` is all of the training; what it calls is the model (unet), the method (flow, discrete) and the data (data,
digits). sample.py draws images from a finished run, and says how good they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

import jobkit
from experiments.imagenet64.data import Part, open_images, split, write_png
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.discrete import DiscreteFlowMatching
from experiments.imagenet64.flow import FlowMatching, fixed_noise, random_times
from jobkit.train import schedule
from jobkit.train.optim import fused_ema_adam

Method = FlowMatching | DiscreteFlowMatching


def train(ctx: jobkit.Context) -> dict[str, float]:
    """Train as the YAML's params say; the result is the loss on held-out images."""
    p = ctx.params
    method = method_of(p)
    net = method.network(p.channels, p.classes, p.unet)
    model = ctx.parallelize(net)  # before data are read: one that cannot be spread fails at once
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=p.lr, betas=tuple(p.betas), ema_decay=p.ema_decay)
    scheduler = schedule.linear(optimizer, steps=p.steps)
    training, held_out = open_data(ctx, p)
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def mean_error(output: Tensor, target: Tensor) -> Tensor:
        return method.error(output, target).mean()

    def validate() -> float:
        with ctx.averaged(optimizer):
            net.eval()
            options = {"batch_size": p.validate_batch, "num_workers": p.workers}
            loss = ctx.evaluate(errors(method, net, ctx.autocast), held_out, **options)
            shown = torch.linspace(0, net.null_label - 1, 10).long()  # classes, spread over all of them
            # dopri5 takes as many steps as a row needs, and ranks that share a model must take equally many.
            images = ctx.map(
                rows(method, net, p, ctx.autocast), shown, batch_size=10 if p.solver == "dopri5" else 1, to="main"
            )
            net.train()
        ctx.log({"validation/loss": loss})
        if ctx.is_main:
            grid = tiled(images.flatten(0, 1), images.shape[1])
            ctx.log_image("samples", grid)
            write_png(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.png", grid)
        return loss

    for step in ctx.steps(p.steps):
        if step % p.validate_every == 0:  # before a batch is drawn: a stop meanwhile leaves the step to be taken again
            validate()
        image, label = next(loader)
        label = label.masked_fill(torch.rand(len(label), device=ctx.device) < p.drop_label, net.null_label)
        t = random_times(len(image), ctx.device, p.skewed)
        x_t, target = method.path(image, method.noise(image.shape, device=ctx.device), t)
        loss = ctx.backward(model, (x_t, t, label), mean_error, target, micro_batch_size=p.micro_batch)
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"train/loss": loss})
    return {"validation_loss": validate()}


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Part, Part]:
    """The images of a recipe, for training and for validation."""
    if p.digits and ctx.is_main:
        write_digits(Path(p.data))
    ctx.barrier()
    images = open_images(Path(p.data), p.res, p.channels)
    if len(images.classes) != p.classes:
        raise ValueError(f"params.classes: found {p.classes}, and {p.data} has {len(images.classes)} classes")
    return split(images, p.held_out, p.flip)


def method_of(p: DictConfig) -> Method:
    """The method that `params.method` names."""
    if p.method not in ("continuous", "discrete"):
        raise ValueError(f"params.method: found {p.method!r}, allowed: continuous, discrete")
    return FlowMatching() if p.method == "continuous" else DiscreteFlowMatching(p.levels)


def errors(
    method: Method, net: nn.Module, autocast: Callable[[], Any] = nullcontext
) -> Callable[[Any, Tensor], Tensor]:
    """What ctx.evaluate calls: the errors of held-out images, always at the same noise and times."""

    def function(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        image, label = batch
        noise, t = fixed_noise(ids, image.shape[1:], method.noise)
        x_t, target = method.path(image, noise, t)
        with autocast():
            return method.error(net(x_t, t, label), target)

    return function


def rows(
    method: Method, net: nn.Module, p: DictConfig, autocast: Callable[[], Any] = nullcontext, columns: int = 8
) -> Callable[[Tensor, Tensor], Tensor]:
    """What ctx.map calls: a row of samples for each label, uint8 [N, columns, C, R, R], always from the same noise."""

    def row(label: Tensor, number: int) -> Tensor:
        generator = torch.Generator(label.device).manual_seed(number)
        with autocast():
            return method.sample(net, label.repeat(columns), (p.channels, p.res, p.res), p, generator)

    def function(labels: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([row(label, number) for label, number in zip(labels, ids.tolist(), strict=True)])

    return function


def tiled(images: Tensor, columns: int) -> Tensor:
    """Images, uint8 [N, C, R, R], framed and side by side in rows, the last one filled up: one image [C, H, W]."""
    zoom = max(1, 32 // images.shape[-1])  # so that a digit of 8 pixels can be seen
    images = torch.cat([images, images.new_zeros(-len(images) % columns, *images.shape[1:])])
    images = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    framed = nn.functional.pad(images, (1, 1, 1, 1), value=128).unflatten(0, (-1, columns))
    return framed.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2, 3)
