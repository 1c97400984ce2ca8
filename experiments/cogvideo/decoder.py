"""From latents to frames that can be watched, by CogVideoX's own video autoencoder (diffusers', an extra: `video`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobkit import JobkitError
from jobkit.run.command_line import to_install


def load_vae(folder: Path | str, device: torch.device, precision: torch.dtype, tiling: bool = False) -> Any:
    """The AutoencoderKLCogVideoX of a folder that diffusers wrote (config.json and weights); nothing is downloaded.

    `tiling`: encode and decode in overlapping tiles that are blended, for a device with little memory. Raises
    JobkitError for a folder that holds no such model.
    """
    try:
        import av  # noqa: F401  # for what is decoded
        from diffusers import AutoencoderKLCogVideoX
    except ImportError as error:
        raise JobkitError(f"{error}: to decode with {folder}: {to_install('diffusers', 'av')}") from None
    try:
        vae = AutoencoderKLCogVideoX.from_pretrained(
            str(folder),
            torch_dtype=precision,
            local_files_only=True,
            low_cpu_mem_usage=find_spec("accelerate") is not None,  # diffusers' default warns where it is not there
        )
    except Exception as error:  # whatever it finds wrong with the folder
        line = " ".join(str(error).split())[:300]
        raise JobkitError(f"{folder}: no AutoencoderKLCogVideoX can be loaded from it: {line}") from error
    if tiling:
        vae.enable_tiling()
    return vae.to(device).eval().requires_grad_(False)


@torch.no_grad()
def decode(vae: Any, latent: Tensor) -> Tensor:
    """A latent [C, T, H, W] of variance 1 as frames, uint8 [4 (T - 1) + 1, 3, 8 H, 8 W] on the CPU.

    Raises ValueError for a latent that is not of the model's channels, or has nothing in it, or no numbers.
    """
    if latent.dim() != 4 or latent.shape[0] != vae.config.latent_channels or not latent.numel():
        found = " x ".join(map(str, latent.shape))
        raise ValueError(f"latent is {found}, expected {vae.config.latent_channels} x frames x height x width")
    if not latent.isfinite().all():
        raise ValueError(f"latent has {(~latent.isfinite()).sum()} of {latent.numel()} values that are no numbers")
    scaled = latent[None].to(vae.device, vae.dtype) / vae.config.scaling_factor
    (video,) = vae.decode(scaled).sample
    return ((video.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).transpose(0, 1).cpu()
