"""The training of cogvideo: what a run does from the YAML's params to its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

import jobkit
from experiments.cogvideo.clips import Clips, split, write_index
from experiments.cogvideo.decoder import decode, load_vae
from experiments.cogvideo.diffusion import NoiseSchedule, denoise, fixed_noise, guided, spread_steps
from experiments.cogvideo.digits import write_moving_digits
from experiments.cogvideo.published import load_published
from experiments.cogvideo.show import side_by_side, strips, to_frames, write_mp4, write_shown
from experiments.cogvideo.transformer import VideoTransformer
from jobkit.train import schedule
from jobkit.train.optim import fused_ema_adam


def train(ctx: jobkit.Context) -> dict[str, float]:
    """Train as the YAML's params say; the result is the loss on held-out clips."""
    p = ctx.params
    # Before data are read: one that cannot be spread fails at once.
    model = net = ctx.parallelize(starting_network(ctx, p))
    optimizer = ctx.optimizer(
        model,
        fused_ema_adam,
        lr=p.lr,
        betas=tuple(p.betas),
        weight_decay=p.weight_decay,
        ema_decay=p.ema_decay,
    )
    scheduler = schedule.cosine(optimizer, steps=p.steps, warmup=min(p.warmup, p.steps // 2), floor=p.floor)
    noise_schedule = NoiseSchedule(p.snr_shift, ctx.device)
    training, held_out = open_data(ctx, p, ctx.run_dir / "clips.npy")
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    frames_of = viewer(ctx, p.vae, p.digits)

    def validate() -> float:
        with ctx.averaged(optimizer):
            options = {"batch_size": p.validate_batch, "num_workers": p.workers}
            loss = ctx.evaluate(errors(ctx, noise_schedule, net), held_out, **options)
            draw = drawn_clips(ctx, noise_schedule, net, p, frames_of)
            videos = ctx.map(draw, Subset(held_out, range(min(p.samples, len(held_out)))), to="main")
        ctx.log({"validation/loss": loss})
        if ctx.is_main:
            ctx.log_image("strips", strips(videos))
            ctx.log_video("clips", side_by_side(videos))
            shown = ctx.run_dir / "samples" / f"step_{ctx.step:08d}"
            for k, video in enumerate(videos if p.vae else ()):
                write_mp4(shown.with_name(f"{shown.name}_{k}.mp4"), video)
            write_shown(shown, videos)
        return loss

    for step in ctx.steps(p.steps):
        if step % p.validate_every == 0:  # before a batch is drawn: a stop meanwhile leaves the step to be taken again
            validate()
        latent, text = next(loader)
        text = text.masked_fill(torch.rand(len(text), 1, 1, device=ctx.device) < p.drop_text, 0)
        t = spread_steps(loader.global_batch_size, loader.rank, loader.world_size, ctx.device)
        x_t, velocity = noise_schedule.noisy(latent, torch.randn_like(latent), t)
        loss = ctx.backward(model, (x_t, t, text), mean_error, velocity, micro_batch_size=p.micro_batch)
        norm = ctx.update(optimizer, max_norm=p.max_norm)
        scheduler.step()
        ctx.log({"train/loss": loss, "train/gradient_norm": norm})
    return {"validation_loss": validate()}


def network(p: DictConfig) -> VideoTransformer:
    """The model of a recipe."""
    return VideoTransformer(channels=p.latent[0], text=p.text[1], **p.model)


def starting_network(ctx: jobkit.Context, p: DictConfig) -> VideoTransformer:
    """The model with random weights, or the published ones of params.start: rank 0 reads them, the others get them."""
    if p.start and not ctx.is_main:
        with torch.device("meta"):
            return network(p)
    net = network(p)
    if p.start:
        load_published(net, p.start)
    return net


def viewer(ctx: jobkit.Context, vae: str, digits: bool) -> Callable[[Tensor], Tensor]:
    """What makes frames of a latent: the autoencoder in the folder `vae`, or, where that is "", to_frames."""
    if not vae:
        return lambda latent: to_frames(latent, digits)
    precision = torch.float32 if ctx.device.type == "cpu" else torch.bfloat16
    decoder = load_vae(vae, ctx.device, precision, tiling=True)
    return lambda latent: decode(decoder, latent)


def open_data(ctx: jobkit.Context, p: DictConfig, index: Path) -> tuple[Subset, Subset]:
    """The clips of a recipe, for training and for validation; `index` is the list of them, made where it is missing."""
    if ctx.is_main:
        if p.digits:
            write_moving_digits(Path(p.data))
        write_index(Path(p.data), index)
    ctx.barrier()
    return split(Clips(Path(p.data), index, p.latent, p.text), p.held_out)


def mean_error(output: Tensor, velocity: Tensor) -> Tensor:
    """Mean square error of a velocity."""
    return F.mse_loss(output.float(), velocity)


def errors(ctx: jobkit.Context, noise_schedule: NoiseSchedule, net: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """What ctx.evaluate calls: the errors of held-out clips, each always at the same noise and step."""

    def function(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        latent, text = batch
        noise, t = fixed_noise(ids, latent)
        x_t, velocity = noise_schedule.noisy(latent, noise, t)
        with ctx.autocast():
            output = net(x_t, t, text)
        return (output.float() - velocity).square().flatten(1).mean(1)

    return function


def drawn_clips(
    ctx: jobkit.Context,
    noise_schedule: NoiseSchedule,
    net: nn.Module,
    p: DictConfig,
    frames_of: Callable[[Tensor], Tensor],
) -> Callable[[Any, Tensor], list[Tensor]]:
    """What ctx.map calls: clips for the texts of others, each drawn once, and decoded, on whichever rank is free."""

    def function(batch: tuple[Tensor, Tensor], ids: Tensor) -> list[Tensor]:
        _, texts = batch
        with ctx.autocast():
            latents = sample_clips(net, noise_schedule, texts, ids.tolist(), p)
        return [frames_of(latent) for latent in latents]

    return function


def sample_clips(
    net: nn.Module, noise_schedule: NoiseSchedule, texts: Tensor, ids: Sequence[int], p: DictConfig
) -> Tensor:
    """Latents [N, C, T, H, W] of clips that texts [N, L, D] describe; each a function of its id and its text."""
    noise, _ = fixed_noise(torch.tensor(ids), texts.new_empty(len(texts), *p.latent))
    return denoise(guided(net, texts, p.guidance), noise, noise_schedule, p.denoising_steps)
