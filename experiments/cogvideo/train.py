"""The training of cogvideo: from the YAML's params to its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

import jobkit
from experiments.cogvideo.codec import Autoencoder, Colours, SpaceToDepth, write_clips
from experiments.cogvideo.data import Clips, split, write_moving_digits
from experiments.cogvideo.diffusion import NoiseSchedule, denoise, fixed_noise, guided, spread_steps
from experiments.cogvideo.published import load_published
from experiments.cogvideo.transformer import VideoTransformer


def train(ctx: jobkit.Context) -> None:
    """Train as the YAML's params say; the result is the loss on held-out clips."""
    p = ctx.params
    model = ctx.parallelize(make_network(ctx, p))
    options = {"lr": p.lr, "betas": tuple(p.betas), "weight_decay": p.weight_decay, "ema_decay": p.ema_decay}
    optimizer = ctx.optimizer(model, jobkit.optim.fused_ema_adam, **options)
    scheduler = jobkit.schedule.cosine(optimizer, steps=p.steps, warmup=p.warmup, floor=p.floor)
    training, held_out = open_data(ctx, p)
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    noise_schedule = NoiseSchedule(p.snr_shift, ctx.device)
    errors, clips = errors_of(ctx, noise_schedule, model), clips_of(ctx, noise_schedule, model, p)

    def validate() -> dict[str, float]:
        folder = ctx.run_dir / "samples" / f"step_{ctx.step:08d}"
        with ctx.evaluating(model, optimizer):
            loss = ctx.evaluate(errors, held_out, batch_size=p.validate_batch)
            ctx.map(clips, Subset(held_out, range(p.samples)), to=folder)
        if ctx.is_main:
            ctx.log_image("strips", write_clips(folder, read_clips(folder)))
        return {"validation/loss": loss}

    for _ in ctx.steps(p.steps, every={validate: p.validate_every}):
        latent, text = next(loader)
        text = text.masked_fill(torch.rand(len(text), 1, 1, device=ctx.device) < p.drop_text, 0)
        t = spread_steps(len(latent), ctx.device)
        x_t, velocity = noise_schedule.noisy(latent, torch.randn_like(latent), t)
        loss = ctx.backward(model, ((x_t, t, text), velocity), mean_error, micro_batch_size=p.micro_batch)
        norm = ctx.update(optimizer, max_norm=p.max_norm)
        scheduler.step()
        ctx.log({"train/loss": loss, "train/gradient_norm": norm})


def make_network(ctx: jobkit.Context, p: DictConfig) -> VideoTransformer:
    """A network without weights, which jobkit draws; on rank 0 with those of params.start, which all ranks get."""
    is_loaded = bool(p.start) and ctx.is_main
    with torch.device("cpu" if is_loaded else "meta"):
        net = VideoTransformer(p.latent[0], p.text[1], **p.model)
    if is_loaded:
        load_published(net, Path(p.start))
    return net


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Subset, Subset]:
    """The clips of a recipe, for training and for validation."""
    if p.digits:
        with ctx.main_first():
            write_moving_digits(Path(p.data))
    return split(Clips(Path(p.data), p.latent, p.text), p.held_out)


def mean_error(output: Tensor, velocity: Tensor) -> Tensor:
    """Mean square error of a velocity."""
    return F.mse_loss(output.float(), velocity)


def errors_of(ctx: jobkit.Context, noise_schedule: NoiseSchedule, model: nn.Module) -> Callable[..., Tensor]:
    """A function for ctx.evaluate: the errors of held-out clips, each always at the same noise and step."""

    def errors(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        latent, text = batch
        noise, t = fixed_noise(ids, latent)
        x_t, velocity = noise_schedule.noisy(latent, noise, t)
        with ctx.autocast():
            output = model(x_t, t, text)
        return (output.float() - velocity).square().flatten(1).mean(1)

    return errors


def clips_of(
    ctx: jobkit.Context, noise_schedule: NoiseSchedule, model: nn.Module, p: DictConfig
) -> Callable[..., dict[str, list[Tensor]]]:
    """A function for ctx.map: for the texts of held-out clips new latents [C, T, H, W], and their frames.

    Each is a function of its id, its text and the weights.
    """
    codec = SpaceToDepth() if p.digits else Autoencoder(p.vae, ctx.device) if p.vae else Colours()

    def clips(batch: tuple[Tensor, Tensor], ids: Tensor) -> dict[str, list[Tensor]]:
        latent, text = batch
        noise, _ = fixed_noise(ids, latent)
        with ctx.autocast():
            latents = denoise(guided(model, text, p.guidance), noise, noise_schedule, p.denoising_steps)
        return {"latents": list(latents), "frames": [codec.decode(latent) for latent in latents]}

    return clips


def read_clips(folder: Path) -> list[Tensor]:
    """The frames of clips that ctx.map has written."""
    return [clip for file in sorted(folder.glob("batch_*.pt")) for clip in torch.load(file)["frames"]]
