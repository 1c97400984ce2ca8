"""The published weights of CogVideoX-2b, a folder `transformer` that diffusers wrote, as those of VideoTransformer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import jobkit
from experiments.cogvideo.transformer import VideoTransformer

RENAMED = {
    "patch_embed.proj": "embed.video", "patch_embed.text_proj": "embed.text",
    "time_embedding.linear_1": "embed.time.0", "time_embedding.linear_2": "embed.time.2",
    "transformer_blocks.": "block_", "1.linear": "1.modulation", "2.linear": "2.modulation",
    "attn1.to_q": "query", "attn1.to_k": "key", "attn1.to_v": "value", "attn1.to_out.0": "out",
    "attn1.norm_q": "norm_query", "attn1.norm_k": "norm_key", "ff.net.0.proj": "widen", "ff.net.2": "narrow",
    "norm_final": "velocity.norm", "norm_out.norm": "velocity.out_norm", "norm_out.linear": "velocity.modulation",
    "proj_out": "velocity.out",
}  # fmt: skip
"""Parts of the names in diffusers' CogVideoXTransformer3DModel, and ours."""


def our_name(name: str) -> str:
    """Our name of a published parameter; another text for a parameter that we do not have."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


@torch.no_grad()
def load_published(net: VideoTransformer, folder: Path) -> None:
    """Copy the weights of a folder (config.json and .safetensors) into a model of the same shapes.

    Raises UsageError, which names the first difference, where they are another model's.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, rescale = net.embed.dim // net.block_0.head, net.embed.rescale
    ours = {"num_attention_heads": heads, "spatial_interpolation_scale": rescale}  # no shape shows these
    for key, value in ours.items():
        if config[key] != value:
            raise jobkit.UsageError(f"{folder}/config.json: {key}: found {config[key]}, expected {value}")
    parameters = dict(net.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            parameter = parameters.pop(our_name(name), torch.empty(0))
            if name == "patch_embed.proj.weight":
                tensor = tensor.flatten(1)  # a convolution's, of one patch
            if tensor.shape != parameter.shape:
                shapes = f"found {list(tensor.shape)}, expected {list(parameter.shape)}"
                raise jobkit.UsageError(f"{file}: {name}: {shapes}")
            parameter.copy_(tensor)
    if parameters:
        raise jobkit.UsageError(f"{folder}: no weights for {', '.join(parameters)}"[:300])
