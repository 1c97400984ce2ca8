"""The training of imagenet64: from the YAML's params to its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

import jobkit
from experiments.imagenet64.data import PackedImages, Part, pack, split, write_png
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.flow import FlowMatching, fixed_noise, random_times


def train(ctx: jobkit.Context) -> dict[str, float] | None:
    """Train as the YAML's params say; the result is the loss on held-out images, where there are any."""
    p, method = ctx.params, FlowMatching()
    net = method.network(p.channels, p.classes, p.unet)
    model = ctx.parallelize(net)
    optimizer = make_optimizer(ctx, model, p)
    scheduler = jobkit.schedule.linear(optimizer, steps=p.steps, floor=p.floor)
    training, held_out = open_data(ctx, p)
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def mean_error(output: Tensor, target: Tensor) -> Tensor:
        return method.error(output, target).mean()

    def validate() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            loss = None
            if len(held_out):
                errors = errors_of(ctx, method, net)
                loss = ctx.evaluate(errors, held_out, batch_size=p.validate_batch, num_workers=p.workers)
            shown = torch.linspace(0, net.null_label - 1, 10).long()  # classes, spread over all of them
            images = ctx.map(rows_of(ctx, method, net, p), shown)
        if ctx.is_main:
            grid = tiled(images.flatten(0, 1), images.shape[1])
            ctx.log_image("samples", grid)
            write_png(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.png", grid)
        return {} if loss is None else {"validation/loss": loss}

    for _ in ctx.steps(p.steps, every={validate: p.validate_every}):
        image, label = next(loader)
        label = label.masked_fill(withheld(len(label), p.drop_label, p.drop_together, ctx.device), net.null_label)
        t = random_times(len(image), ctx.device, p.skewed)
        x_t, target = method.path(image, method.noise(image.shape, device=ctx.device), t)
        loss = ctx.backward(model, ((x_t, t, label), target), mean_error, micro_batch_size=p.micro_batch)
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"train/loss": loss})
    return None


def make_optimizer(ctx: jobkit.Context, model: nn.Module, p: DictConfig) -> torch.optim.Optimizer:
    """AdamW, with moving averages of the weights where `params.ema_decay` is given."""
    options = {"lr": p.lr, "betas": tuple(p.betas), "weight_decay": p.weight_decay}
    if p.ema_decay is None:
        return ctx.optimizer(model, torch.optim.AdamW, **options)
    return ctx.optimizer(model, jobkit.optim.fused_ema_adam, ema_decay=p.ema_decay, **options)


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Part, Part]:
    """The images of a recipe, for training and for validation."""
    with ctx.main_first():
        if p.digits:
            write_digits(Path(p.data))
        packed = pack(Path(p.data), p.res, p.channels)
    images = PackedImages(packed)
    if len(images.classes) != p.classes:
        raise jobkit.UsageError(f"params.classes: found {p.classes}, and {p.data} has {len(images.classes)} classes")
    return split(images, p.held_out, p.flip)


def withheld(n: int, probability: float, together: int, device: torch.device) -> Tensor:
    """Return a mask of n labels, bool [n]: `together` of them at a time are withheld, with a probability."""
    drawn = torch.rand(-(-n // together), device=device) < probability
    return drawn.repeat_interleave(together)[:n]


def errors_of(
    ctx: jobkit.Context, method: FlowMatching, net: nn.Module
) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    """A function for ctx.evaluate: the errors of held-out images, always at the same noise and times."""

    def errors(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        image, label = batch
        noise, t = fixed_noise(ids, image.shape[1:], method.noise)
        x_t, target = method.path(image, noise, t)
        with ctx.autocast():
            return method.error(net(x_t, t, label), target)

    return errors


def rows_of(
    ctx: jobkit.Context, method: FlowMatching, net: nn.Module, p: DictConfig, columns: int = 8
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function for ctx.map: a row of samples for a label, uint8 [1, columns, C, R, R], always from the same noise."""

    def row(label: Tensor, number: Tensor) -> Tensor:
        generator = torch.Generator(label.device).manual_seed(int(number))
        with ctx.autocast():
            images = method.sample(net, label.repeat(columns), (p.channels, p.res, p.res), p, generator)
        return images[None]

    return row


def tiled(images: Tensor, columns: int) -> Tensor:
    """Images, uint8 [N, C, R, R], framed and side by side in rows: one image [C, H, W]."""
    zoom = max(1, 32 // images.shape[-1])  # so that a digit of 8 pixels can be seen
    images = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    framed = nn.functional.pad(images, (1, 1, 1, 1), value=128).unflatten(0, (-1, columns))
    return framed.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2, 3)
