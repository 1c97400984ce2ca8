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
from experiments.imagenet64.discrete import DiscreteFlowMatching
from experiments.imagenet64.fid import Fid
from experiments.imagenet64.flow import FlowMatching, fixed_noise, random_times
from experiments.imagenet64.unet import load_initial

Method = FlowMatching | DiscreteFlowMatching


def train(ctx: jobkit.Context) -> None:
    """Train as the YAML's params say; the result is the loss on held-out images and FID, where there are any."""
    p = ctx.params
    method = method_of(p)
    net = method.network(p.channels, p.classes, p.unet)
    if p.init_from:
        load_initial(net, p.init_from)
    model = ctx.parallelize(net)
    optimizer = make_optimizer(ctx, model, p)
    scheduler = jobkit.schedule.linear(optimizer, steps=p.steps, floor=p.floor)
    training, held_out = open_data(ctx, p)
    fid = Fid(ctx, p.inception, training) if p.fid_every else None
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    draw = draw_of(ctx, method, net, (p.channels, p.res, p.res))

    def mean_error(output: Tensor, target: Tensor) -> Tensor:
        return method.error(output, target).mean()

    def validate() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            shown = torch.linspace(0, p.classes - 1, 10).long()  # classes, spread over all of them: a row for each
            images = ctx.map(draw, shown.repeat_interleave(8), batch_size=8)
            if ctx.is_main:
                ctx.log_image("samples", tiled(images, 8))
                write_png(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.png", tiled(images, 8))
            if not len(held_out):
                return {}
            options = {"batch_size": p.validate_batch, "num_workers": p.workers}
            return {"validation/loss": ctx.evaluate(errors_of(ctx, method, net), held_out, **options)}

    def measure() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            labels = [number % p.classes for number in range(p.fid_samples)]
            features = ctx.map(lambda label, ids: fid.features(draw(label, ids)), labels, batch_size=p.fid_batch)
        return {"validation/fid": fid.of(features)} if ctx.is_main else {}

    every = {validate: p.validate_every, **({measure: p.fid_every} if fid else {})}
    for _ in ctx.steps(p.steps, every):
        image, label = next(loader)
        label = label.masked_fill(withheld(len(label), p.drop_label, p.drop_together, ctx.device), net.null_label)
        t = random_times(len(image), ctx.device, p.skewed)
        x_t, target = method.path(image, method.noise(image.shape, device=ctx.device), t)
        loss = ctx.backward(model, ((x_t, t, label), target), mean_error, micro_batch_size=p.micro_batch)
        ctx.update(optimizer)
        scheduler.step()
        ctx.log({"train/loss": loss})


def method_of(p: DictConfig) -> Method:
    """The method that `params.method` names."""
    if p.method not in ("continuous", "discrete"):
        raise jobkit.UsageError(f"params.method: found {p.method!r}, allowed: continuous, discrete")
    return FlowMatching() if p.method == "continuous" else DiscreteFlowMatching(p.levels)


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


def errors_of(ctx: jobkit.Context, method: Method, net: nn.Module) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    """A function for ctx.evaluate: the errors of held-out images, always at the same noise and times."""

    def errors(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        image, label = batch
        noise, t = fixed_noise(ids, image.shape[1:], method.noise)
        x_t, target = method.path(image, noise, t)
        with ctx.autocast():
            return method.error(net(x_t, t, label), target)

    return errors


def draw_of(
    ctx: jobkit.Context, method: Method, net: nn.Module, shape: tuple[int, int, int]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function for ctx.map: images of labels, uint8 [N, *shape]; a batch has the same noise whenever it is drawn."""

    def draw(label: Tensor, ids: Tensor) -> Tensor:
        with ctx.autocast():
            return method.sample(net, label, shape, ctx.params)

    return draw


def tiled(images: Tensor, columns: int) -> Tensor:
    """Images, uint8 [N, C, R, R], framed and side by side in whole rows: one image [C, H, W]."""
    zoom = max(1, 32 // images.shape[-1])  # so that a digit of 8 pixels can be seen
    images = images[: len(images) // columns * columns].repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    framed = nn.functional.pad(images, (1, 1, 1, 1), value=128).unflatten(0, (-1, columns))
    return framed.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2, 3)
