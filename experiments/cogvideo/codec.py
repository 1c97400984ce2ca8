"""Between frames, uint8 [T, C, H, W], and latents of variance 1, float32; and frames as files that can be watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import jobkit


class SpaceToDepth:
    """Grey pixels rearranged: 2 x 2 of them become the channels of a position. A latent is [4, T, H / 2, W / 2]."""

    MEAN, DEVIATION = 0.0763, 0.2298
    """Of all pixels of the moving digits, from 0 to 1."""

    def encode(self, frames: Tensor) -> Tensor:
        pixels = (frames.float() / 255 - self.MEAN) / self.DEVIATION
        return F.pixel_unshuffle(pixels, 2).transpose(0, 1).contiguous()

    def decode(self, latent: Tensor) -> Tensor:
        pixels = F.pixel_shuffle(latent.float().transpose(0, 1), 2) * self.DEVIATION + self.MEAN
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8).cpu()


class Autoencoder:
    """CogVideoX's own: the AutoencoderKLCogVideoX in a folder that diffusers wrote; nothing is downloaded.

    A latent is [16, (T - 1) / 4 + 1, H / 8, W / 8].
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        try:
            from diffusers import AutoencoderKLCogVideoX
        except ImportError:
            raise jobkit.UsageError(f"params.vae: {folder} needs a package: pip install diffusers") from None
        precision = torch.float32 if device.type == "cpu" else torch.bfloat16
        vae = AutoencoderKLCogVideoX.from_pretrained(folder, torch_dtype=precision, local_files_only=True)
        vae.enable_tiling()  # overlapping tiles, which are blended: a clip at once is more than a GPU holds
        self.vae = vae.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        pixels = (frames.to(self.vae.device).float() / 127.5 - 1).to(self.vae.dtype)
        (latent,) = self.vae.encode(pixels.transpose(0, 1)[None]).latent_dist.sample()
        return latent.float() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        scaled = latent[None].to(self.vae.device, self.vae.dtype) / self.vae.config.scaling_factor
        (pixels,) = self.vae.decode(scaled).sample
        return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).transpose(0, 1).cpu()


class Colours:
    """Latents as they are, where there is no decoder: three channels as colours, three deviations either way."""

    def decode(self, latent: Tensor) -> Tensor:
        return ((latent[:3].float() / 6 + 0.5) * 255).round().clamp(0, 255).to(torch.uint8).transpose(0, 1).cpu()


def write_clips(file: Path, clips: Sequence[Tensor]) -> Tensor:
    """Write clips [T, C, H, W] as file.gif, side by side, and file.png, a strip of frames each; returns the strips."""
    zoom = max(1, 64 // clips[0].shape[-1])  # so that a digit of 8 pixels can be seen
    large = [clip.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3) for clip in clips]
    framed = [F.pad(clip, (1, 1, 1, 1), value=128) for clip in large]
    strips = torch.cat([torch.cat(list(clip), dim=2) for clip in framed], dim=1)
    pictures = [strips, *torch.cat(framed, dim=3)]
    strip, *frames = (Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()) for pixels in pictures)
    strip.save(file.with_suffix(".png"))
    frames[0].save(file.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=125, loop=0)
    return strips


def write_mp4(file: Path, clip: Tensor, frames_per_second: int = 8) -> None:
    """Write a clip [T, 3, H, W] to be watched; needs PyAV (`av`), and an even height and width."""
    import av

    with av.open(file, "w") as container:
        stream = container.add_stream("libx264", rate=frames_per_second)
        stream.height, stream.width, stream.pix_fmt = *clip.shape[2:], "yuv420p"
        for picture in clip.permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
