"""The training of imagenet64: what a run does from the YAML's params to its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import jobkit
from experiments.imagenet64.check import METHODS
from experiments.imagenet64.data import Part, open_images, split, write_png
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.discrete import DiscreteFlowMatching
from experiments.imagenet64.fid import Fid, Inception
from experiments.imagenet64.flow import FlowMatching, fixed_noise, random_times
from jobkit.errors import UsageError
from jobkit.train import schedule
from jobkit.train.optim import fused_ema_adam
from jobkit.train.seeds import derive_seed

Method = FlowMatching | DiscreteFlowMatching


def train(ctx: jobkit.Context, network: Callable[[str], nn.Module] = Inception) -> dict[str, float | None]:
    """Train as the YAML's params say; the result is the loss on held-out images and FID, where there are any.

    `network` is what FID's features are of, made of `params.inception`.
    """
    p = ctx.params
    method = method_of(p)
    net = method.network(p.channels, p.classes, p.unet)
    model = ctx.parallelize(net)  # before data are read: one that cannot be spread fails at once
    optimizer = make_optimizer(ctx, model, p)
    scheduler = schedule.linear(optimizer, steps=p.steps, floor=p.floor)
    is_shared = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if is_shared and p.fid_every and p.solver == "dopri5":
        raise UsageError("params.solver: dopri5 takes other numbers of steps on ranks that share a model: take heun2")
    training, held_out = open_data(ctx, p)
    fid = Fid(ctx, network, p.inception, training, Path(p.data)) if p.fid_every else None
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def mean_error(output: Tensor, target: Tensor) -> Tensor:
        return method.error(output, target).mean()

    def validate() -> dict[str, float]:
        loss = None
        with ctx.averaged(optimizer):
            net.eval()
            if len(held_out):
                options = {"batch_size": p.validate_batch, "num_workers": p.workers}
                loss = ctx.evaluate(errors(method, net, ctx.autocast), held_out, **options)
            shown = torch.linspace(0, net.null_label - 1, 10).long()  # classes, spread over all of them
            # dopri5 takes as many steps as a row needs, and ranks that share a model must take equally many.
            images = ctx.map(
                rows(method, net, p, ctx.autocast),
                shown,
                batch_size=10 if is_shared and p.solver == "dopri5" else 1,
                to="main",
            )
            net.train()
        ctx.log({"validation/loss": loss})
        if ctx.is_main:
            grid = tiled(images.flatten(0, 1), images.shape[1])
            ctx.log_image("samples", grid)
            write_png(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.png", grid)
        return {} if loss is None else {"validation_loss": loss}

    def measure(fid: Fid) -> float | None:
        with ctx.averaged(optimizer):
            net.eval()
            labels = [number % p.classes for number in range(p.fid_samples)]
            found = fid.of(draws(ctx, method, net, (p.channels, p.res, p.res)), labels, p.fid_batch)
            net.train()
        ctx.log({"validation/fid": found})
        return found

    epoch = max(1, len(training) // p.batch)  # steps
    for step in ctx.steps(p.steps):
        # Before a batch is drawn: a stop meanwhile leaves the step to be taken again.
        if step % p.validate_every == 0:
            validate()
        if fid is not None and step > 0 and step % (p.fid_every * epoch) == 0:
            measure(fid)
        image, label = next(loader)
        label = label.masked_fill(withheld(len(label), p.drop_label, p.drop_together, ctx.device), net.null_label)
        t = random_times(len(image), ctx.device, p.skewed)
        x_t, target = method.path(image, method.noise(image.shape, device=ctx.device), t)
        loss = ctx.backward(model, (x_t, t, label), mean_error, target, micro_batch_size=p.micro_batch)
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"train/loss": loss})
    return {**validate(), **({"fid": measure(fid)} if fid is not None else {})}


def make_optimizer(ctx: jobkit.Context, model: nn.Module, p: DictConfig) -> torch.optim.Optimizer:
    """AdamW, with moving averages of the weights where `params.ema_decay` is given."""
    options = {"lr": p.lr, "betas": tuple(p.betas), "weight_decay": p.weight_decay}
    if p.ema_decay is None:
        return ctx.optimizer(model, torch.optim.AdamW, **options)
    return ctx.optimizer(model, fused_ema_adam, ema_decay=p.ema_decay, **options)


def withheld(n: int, probability: float, together: int, device: torch.device) -> Tensor:
    """Which of n labels are withheld, bool [n]: `together` of them at a time, with a probability."""
    drawn = torch.rand(-(-n // together), device=device) < probability
    return drawn.repeat_interleave(together)[:n]


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Part, Part]:
    """The images of a recipe, for training and for validation."""
    if p.digits and ctx.is_main:
        write_digits(Path(p.data))
    ctx.barrier()
    images = open_images(Path(p.data), p.res, p.channels)
    if len(images.classes) != p.classes:
        raise UsageError(f"params.classes: found {p.classes}, and {p.data} has {len(images.classes)} classes")
    return split(images, p.held_out, p.flip)


def method_of(p: DictConfig) -> Method:
    """The method that `params.method` names."""
    if p.method not in METHODS:
        raise UsageError(f"params.method: found {p.method!r}, allowed: {', '.join(METHODS)}")
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


def draws(
    ctx: jobkit.Context, method: Method, net: nn.Module, shape: tuple[int, int, int]
) -> Callable[[Tensor, Tensor], Tensor]:
    """What ctx.map calls: an image of each label, uint8 [N, *shape], by the solver that the YAML's params name.

    Their noise is that of the batch, by its first number: dopri5 chooses its steps for a batch as a whole.
    """

    def function(labels: Tensor, ids: Tensor) -> Tensor:
        generator = torch.Generator(labels.device).manual_seed(derive_seed(ctx.seed, "sample", int(ids[0])))
        with ctx.autocast():
            return method.sample(net, labels, shape, ctx.params, generator)

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
