"""A folder of weights that diffusers wrote: its files, and whether they are of the model that params describe.

No torch: a submission looks at them, too.

    <folder>/config.json                                    what the model is
    <folder>/diffusion_pytorch_model.safetensors            its tensors, by name; in several files those of the index:
    <folder>/diffusion_pytorch_model.safetensors.index.json which tensor is in which
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.run.array_files import product, shapes_in

WEIGHTS = "diffusion_pytorch_model.safetensors"
"""Or, for weights in several files, that name with .index.json."""
ALWAYS = {
    "use_rotary_positional_embeddings": False,
    "use_learned_positional_embeddings": False,
    "patch_size_t": None,
    "ofs_embed_dim": None,
    "attention_bias": True,
    "patch_bias": True,
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu",
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "temporal_interpolation_scale": 1.0,
}
"""What a transformer's config.json says, where it says it: of the 5b and of version 1.5 some of this is different."""


PARAMS = {
    "num_attention_heads": "model.heads",
    "attention_head_dim": "model.dim / params.model.heads",
    "num_layers": "model.layers",
    "time_embed_dim": "model.time",
    "text_embed_dim": "text[1]",
    "in_channels": "latent[0]",
    "out_channels": "latent[0]",
    "patch_size": "model.patch",
    "spatial_interpolation_scale": "model.rescale",
}
"""The params that a key of config.json is compared with."""


def files_of_weights(folder: Path) -> set[str]:
    """The names of the files of weights; ValueError where the index does not say."""
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        return {WEIGHTS}
    return set(weight_map(index).values())


def weight_map(index: Path) -> dict[str, str]:
    """Which tensor is in which file, by an index; ValueError where it does not say, OSError where it cannot be read."""
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: cannot be read: {type(error).__name__}: {error}") from None
    raise ValueError(f"{index}: its weight_map names other things than files")


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says; ValueError where it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{folder / 'config.json'}: found {type(found).__name__}, expected a mapping")
    return found


def check_config(folder: Path, config: Mapping[str, Any], **ours: Any) -> None:
    """ValueError where the config.json of a folder describes a model that computes something else than ours, of which
    `ours` is what it must say, where it says it."""
    for key, value in (ALWAYS | ours).items():
        if key in config and config[key] != value:
            of = f", of params.{PARAMS[key]}" if key in PARAMS else ""
            raise ValueError(f"{folder / 'config.json'}: {key}: found {config[key]}, expected {value}{of}")


def check_transformer(folder: Path, model: Mapping[str, Any], channels: int, text: int) -> None:
    """ValueError where the weights are not those of a transformer with `params.model`, by config.json and by the heads
    of the files, or a file is torn."""
    dim, heads, layers, time, patch = (model[key] for key in ("dim", "heads", "layers", "time", "patch"))
    check_config(
        folder,
        config_of(folder),
        num_attention_heads=heads,
        patch_size=patch,
        spatial_interpolation_scale=model["rescale"],
        attention_head_dim=dim // heads,
        num_layers=layers,
        time_embed_dim=time,
        text_embed_dim=text,
        in_channels=channels,
        out_channels=channels,
    )
    found = shapes_of(folder)
    expected = {
        "patch_embed.proj.weight": (dim, channels, patch, patch),
        "patch_embed.text_proj.weight": (dim, text),
        "time_embedding.linear_1.weight": (time, dim),
        f"transformer_blocks.{layers - 1}.attn1.norm_q.weight": (dim // heads,),
        "proj_out.weight": (patch * patch * channels, dim),
    }
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{folder}: no {name} in its files")
        if found[name] != shape:
            raise ValueError(f"{folder}: {name} is {product(found[name])}, expected {product(shape)}")
    if more := next((name for name in found if name.startswith(f"transformer_blocks.{layers}.")), None):
        raise ValueError(f"{folder}: {more} is nothing that a model of {layers} layers has")


def check_decoder(folder: Path, latent: Sequence[int] | None) -> None:
    """ValueError where an autoencoder's config.json is not that of CogVideoX's, or of latents with other channels."""
    config = config_of(folder)
    expected = {"_class_name": "AutoencoderKLCogVideoX"} | ({"latent_channels": latent[0]} if latent else {})
    for key, value in expected.items():
        if key in config and config[key] != value:
            raise ValueError(f"{folder / 'config.json'}: {key}: found {config[key]}, expected {value}")


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors, by name; ValueError for a file that is torn, and where one lacks what the index says."""
    in_files = {file: shapes_in(folder / file) for file in files_of_weights(folder)}
    index = folder / f"{WEIGHTS}.index.json"
    for name, file in (weight_map(index) if index.exists() else {}).items():
        if name not in in_files[file]:
            raise ValueError(f"{folder / file}: no {name} in it, which {index.name} says")
    return {name: shape for shapes in in_files.values() for name, shape in shapes.items()}
