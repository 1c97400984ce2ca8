"""Clips from a finished run of cogvideo, for the texts of its held-out clips, and its loss on all of those.

python -m jobkit.submit experiments/cogvideo_sample.yaml --local params.run=runs/cogvideo-...
"""

from __future__ import annotations

from omegaconf import OmegaConf
from torch.utils.data import Subset

import jobkit
from experiments.cogvideo.codec import write_clips, write_mp4
from experiments.cogvideo.diffusion import NoiseSchedule
from experiments.cogvideo.train import clips_of, errors_of, open_data, read_clips
from experiments.cogvideo.transformer import VideoTransformer


def sample(ctx: jobkit.Context) -> dict[str, float]:
    """Write samples/batch_<number>.pt, latents and frames, and <number>.gif and .png; with params.vae .mp4 too."""
    run = jobkit.open_run(ctx.params.run)
    p = OmegaConf.merge(run.params, ctx.params)
    _, held_out = open_data(ctx, p)
    noise_schedule = NoiseSchedule(p.snr_shift, ctx.device)
    net = VideoTransformer(p.latent[0], p.text[1], **p.model)
    net.load_state_dict(run.weights())
    net.to(ctx.device).eval()
    loss = ctx.evaluate(errors_of(ctx, noise_schedule, net), held_out, batch_size=p.validate_batch)
    folder = ctx.run_dir / "samples"
    ctx.map(clips_of(ctx, noise_schedule, net, p), Subset(held_out, range(p.clips)), to=folder, batch_size=p.batch)
    if ctx.is_main:
        for number, clip in enumerate(read_clips(folder)):
            write_clips(folder / f"{number:04d}", [clip])
            if p.vae:
                write_mp4(folder / f"{number:04d}.mp4", clip)
    return {"validation/loss": loss}
