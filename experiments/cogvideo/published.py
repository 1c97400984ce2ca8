"""The published weights of CogVideoX-2b, a folder `transformer` that diffusers wrote, as those of VideoTransformer."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments.cogvideo.transformer import VideoTransformer
from experiments.cogvideo.weights_folder import WEIGHTS, check_config, config_of, weight_map
from jobkit import JobkitError
from jobkit.errors import UsageError

MODULES = (
    (r"patch_embed\.proj", "embed.video"),
    (r"patch_embed\.text_proj", "embed.text"),
    (r"time_embedding\.linear_1", "embed.time.0"),
    (r"time_embedding\.linear_2", "embed.time.2"),
    (r"transformer_blocks\.(\d+)\.(norm[12])\.norm", r"block_\1.\2.norm"),
    (r"transformer_blocks\.(\d+)\.(norm[12])\.linear", r"block_\1.\2.modulation"),
    (r"transformer_blocks\.(\d+)\.attn1\.to_q", r"block_\1.attention.query"),
    (r"transformer_blocks\.(\d+)\.attn1\.to_k", r"block_\1.attention.key"),
    (r"transformer_blocks\.(\d+)\.attn1\.to_v", r"block_\1.attention.value"),
    (r"transformer_blocks\.(\d+)\.attn1\.norm_q", r"block_\1.attention.norm_query"),
    (r"transformer_blocks\.(\d+)\.attn1\.norm_k", r"block_\1.attention.norm_key"),
    (r"transformer_blocks\.(\d+)\.attn1\.to_out\.0", r"block_\1.attention.out"),
    (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"block_\1.feed_forward.0"),
    (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"block_\1.feed_forward.2"),
    (r"norm_final", "velocity.norm"),
    (r"norm_out\.norm", "velocity.out_norm"),
    (r"norm_out\.linear", "velocity.modulation"),
    (r"proj_out", "velocity.out"),
)
"""Modules of diffusers' CogVideoXTransformer3DModel, and ours."""


def our_name(name: str) -> str | None:
    """Our parameter of one of diffusers' model; None where there is none."""
    module, _, kind = name.rpartition(".")
    for pattern, ours in MODULES:
        if re.fullmatch(pattern, module):
            return f"{re.sub(pattern, ours, module)}.{kind}"
    return None


def load_published(net: VideoTransformer, folder: Path | str) -> None:
    """Copy the weights of a folder (config.json and .safetensors) into a model, one tensor after the other.

    Raises JobkitError for a folder that cannot be read, UsageError where it is of another model, or lacks weights; both
    name the first.
    """
    folder = Path(folder)
    try:
        config = config_of(folder)
    except ValueError as error:
        raise JobkitError(str(error)) from None
    try:
        check_config(
            folder,
            config,
            num_attention_heads=net.embed.dim // net.block_0.attention.head,
            patch_size=net.embed.patch,
            spatial_interpolation_scale=net.embed.rescale,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    own = dict(net.named_parameters())
    for name, file in _files(folder).items():
        ours = our_name(name)
        if ours is None or ours not in own:
            raise UsageError(
                f"{file}: {name} is nothing that this model has: it is not CogVideoX-2b's, or has more layers"
            )
        tensor = _tensor(file, name)
        if ours == "embed.video.weight":
            tensor = tensor.flatten(1)  # a convolution's, of one patch
        parameter = own.pop(ours)
        if tensor.shape != parameter.shape:
            found, expected = (" x ".join(map(str, shape)) for shape in (tensor.shape, parameter.shape))
            raise UsageError(f"{file}: {name} is {found}, expected {expected} ({ours})")
        with torch.no_grad():
            parameter.copy_(tensor)
    if own:
        raise UsageError(f"{folder}: no weights for {next(iter(own))} in it, and for {len(own) - 1} more")


def _files(folder: Path) -> dict[str, Path]:
    """Which file has which tensor."""
    index = folder / f"{WEIGHTS}.index.json"
    try:
        if index.exists():
            return {name: folder / file for name, file in weight_map(index).items()}
        with safe_open(folder / WEIGHTS, "pt") as opened:
            return dict.fromkeys(opened.keys(), folder / WEIGHTS)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (OSError, SafetensorError) as error:
        raise JobkitError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def _tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise JobkitError(f"{file}: no {name} can be read from it: {error}") from None
