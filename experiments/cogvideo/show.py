"""Latents as something to look at: frames, strips of frames, animations; and as files, each of which appears whole."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from experiments.cogvideo.digits import to_pixels
from jobkit.run.files import write_atomic
from jobkit.train.video import gif, mp4

ROWS, COLUMNS = 160, 13
"""The most pixels of a frame's height, and the most frames of a strip, in what gives an overview."""


def to_frames(latent: Tensor, digits: bool) -> Tensor:
    """A latent [C, T, H, W] as frames, uint8 [T, 1 or 3, H', W'].

    Those of digits are pixels rearranged. Others are for decoder.py; what is shown without it is the latent itself, its
    first three channels as red, green and blue, three standard deviations either way.
    """
    latent = latent.float().cpu()
    if digits:
        pixels = torch.from_numpy(to_pixels(latent.numpy()))[:, None]
        pixels = pixels.repeat_interleave(4, -2).repeat_interleave(4, -1)  # so that a digit of 8 pixels can be seen
    else:
        pixels = latent[:3].transpose(0, 1) / 6 + 0.5
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)


def side_by_side(videos: list[Tensor]) -> Tensor:
    """Videos [T, C, H, W] framed and beside each other: one video, of large ones a smaller one."""
    return torch.cat([_framed(_small(video)) for video in videos], dim=3)


def strips(videos: list[Tensor]) -> Tensor:
    """Frames of each video [T, C, H, W] from left to right, the videos below each other: one image [C, H', W']."""
    some = [_small(video[:: math.ceil(len(video) / COLUMNS)]) for video in videos]
    return torch.cat([torch.cat(list(_framed(video)), dim=2) for video in some], dim=1)


def _small(video: Tensor) -> Tensor:
    factor = math.ceil(video.shape[2] / ROWS)
    if factor == 1:
        return video
    return F.avg_pool2d(video.float(), factor).round().to(torch.uint8)


def _framed(video: Tensor) -> Tensor:
    return F.pad(video, (1, 1, 1, 1), value=128)


def write_shown(path: Path, videos: list[Tensor]) -> None:
    """Write path.png, the strips, and then path.gif, the animation."""
    path.parent.mkdir(exist_ok=True)
    png = io.BytesIO()
    Image.fromarray(strips(videos).permute(1, 2, 0).squeeze(-1).numpy()).save(png, format="png")
    write_atomic(path.with_suffix(".png"), png.getvalue())
    write_atomic(path.with_suffix(".gif"), gif(side_by_side(videos)))


def write_mp4(path: Path, video: Tensor) -> None:
    """Write a video [T, 3, H, W] to be watched."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, mp4(video))


def write_latent(path: Path, latent: Tensor, weights: str) -> None:
    """Write a latent for a decoder to take, as a safetensors file like those that it was learnt from, which says of
    which weights it is."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, save({"latent": latent.contiguous().cpu()}, metadata={"weights": weights}))


def is_of(path: Path, weights: str) -> bool:
    """Whether `write_latent` has written a file of these weights."""
    try:
        with safe_open(path, "pt") as opened:
            return (opened.metadata() or {}).get("weights") == weights
    except (OSError, SafetensorError):
        return False
