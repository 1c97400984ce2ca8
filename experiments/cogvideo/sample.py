"""Clips from a finished run of cogvideo, as samples/<number>.safetensors, .png and .gif; as .mp4 with a decoder.

    python -m jobkit.submit experiments/cogvideo_sample.yaml --local params.run=runs/cogvideo-...

`sample` is an experiment like `train`, but for steps: what it has done is on disk as soon as it is done.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Subset

import jobkit
from experiments.cogvideo.diffusion import NoiseSchedule
from experiments.cogvideo.show import is_of, side_by_side, strips, write_latent, write_mp4, write_shown
from experiments.cogvideo.train import errors, network, open_data, sample_clips, viewer
from jobkit.train.exported import load_weights, weights_digest


def sample(ctx: jobkit.Context) -> dict[str, float]:
    """Make `params.clips` clips, for the texts of held-out ones; the result is the loss on all of those.

    A clip that is there already, from an attempt that was interrupted, is not made again, unless the run has other
    weights now.
    """
    p = ctx.params
    trained = OmegaConf.load(Path(p.run) / "config.yaml").params
    _, held_out = open_data(ctx, trained, Path(p.run) / "clips.npy")
    noise_schedule = NoiseSchedule(trained.snr_shift, ctx.device)
    net = network(trained).to(ctx.device).eval()
    load_weights(net, p.run)
    weights = weights_digest(p.run)
    recipe = OmegaConf.merge(trained, p)
    frames_of = viewer(ctx, p.vae, trained.digits)

    def file(number: int) -> Path:
        return ctx.run_dir / "samples" / f"{number:06d}"

    def is_made(number: int) -> bool:
        gif = file(number).with_suffix(".gif")
        if not is_of(file(number).with_suffix(".safetensors"), weights):
            gif.unlink(missing_ok=True)  # it is written last, and says that all of the clip is there
        return gif.exists()

    def make(batch: tuple[Tensor, Tensor], ids: Tensor) -> None:
        missing = [k for k, number in enumerate(ids.tolist()) if not is_made(number)]
        if missing:
            _, texts = batch
            numbers = ids[missing].tolist()
            with ctx.autocast():
                latents = sample_clips(net, noise_schedule, texts[missing], numbers, recipe)
            for number, latent in zip(numbers, latents, strict=True):
                write_latent(file(number).with_suffix(".safetensors"), latent, weights)
                video = frames_of(latent)
                if p.vae:
                    write_mp4(file(number).with_suffix(".mp4"), video)
                write_shown(file(number), [video])

    ctx.map(make, Subset(held_out, [number % len(held_out) for number in range(p.clips)]), batch_size=p.batch)
    if ctx.is_main:
        print(f"samples: {ctx.run_dir / 'samples'}", flush=True)
    loss = ctx.evaluate(errors(ctx, noise_schedule, net), held_out, batch_size=trained.validate_batch)
    if ctx.is_main:
        latents = [load_file(file(number).with_suffix(".safetensors"))["latent"] for number in range(min(p.clips, 8))]
        videos = [frames_of(latent) for latent in latents]
        ctx.log_image("strips", strips(videos))
        ctx.log_video("clips", side_by_side(videos))
    return {"validation_loss": loss}
