"""Class-conditional flow matching on ImageNet 64 x 64, or on handwritten digits where there is no ImageNet.

    python -m jobkit.submit experiments/imagenet64.yaml --local

`train` is all of the training; what it calls is the model (unet), the method (flow) and the data (data, digits).
"""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

import jobkit
from experiments.imagenet64.data import open_images, split, to_uint8, to_unit
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.flow import fixed_noise, guided, integrate, loss_per_sample, random_times
from experiments.imagenet64.unet import UNet


def train(ctx: jobkit.Context) -> dict[str, float]:
    """Train as the YAML's params say; the result is the loss on held-out images."""
    p = ctx.params
    if p.digits and ctx.is_main:
        write_digits(Path(p.data))
    ctx.barrier()
    images = open_images(Path(p.data), p.res, p.channels)
    training, held_out = split(images, p.held_out, p.flip)

    net = UNet(p.channels, len(images.classes), **p.unet)
    model = ctx.parallelize(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=p.lr, betas=tuple(p.betas))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / p.steps)
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def error(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        image, label = batch
        x0, t = fixed_noise(ids, image)
        with ctx.autocast():
            return loss_per_sample(net, to_unit(image), label, x0, t)

    def validate() -> float:
        net.eval()
        loss = ctx.evaluate(error, held_out, batch_size=p.validate_batch)
        ctx.log({"validation/loss": loss})
        if ctx.is_main:
            with ctx.autocast():
                grid = sample_grid(net, p, ctx.device)
            ctx.log_image("samples", grid)
            write_png(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.png", grid)
        net.train()
        return loss

    for step in ctx.steps(p.steps):
        if step % p.validate_every == 0:  # before a batch is drawn: a stop meanwhile leaves the step to be taken again
            validate()
        image, label = next(loader)
        unlabelled = torch.rand(len(label), device=ctx.device) < p.drop_label
        label = label.masked_fill(unlabelled, net.null_label)
        x1 = to_unit(image)
        with ctx.autocast():
            t = random_times(len(x1), ctx.device, p.skewed)
            loss = loss_per_sample(model, x1, label, torch.randn_like(x1), t).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ctx.log({"train/loss": loss})
    return {"validation_loss": validate()}


def sample_grid(net: UNet, p: DictConfig, device: torch.device, columns: int = 8) -> Tensor:
    """Ten classes, spread over all of them, a row each: uint8 [C, H, W]. Always from the same noise."""
    label = torch.linspace(0, net.null_label - 1, 10).long().repeat_interleave(columns).to(device)
    noise = torch.randn(len(label), p.channels, p.res, p.res, generator=torch.Generator().manual_seed(0))
    samples = integrate(guided(net, label, p.guidance), noise.to(device), p.solver, p.solver_steps)
    zoom = max(1, 32 // p.res)  # so that a digit of 8 pixels can be seen
    images = to_uint8(samples).cpu().repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1), value=128).unflatten(0, (10, columns))
    return framed.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2, 3)


def write_png(path: Path, image: Tensor) -> None:
    """Write a uint8 image [C, H, W]; the file appears whole."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(temporary, format="png")
    temporary.replace(path)
