"""A trained model's weights, put together from all ranks and written for others to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.run.files import fsync_dir
from jobkit.train.parallel import unwrapped
from jobkit.train.pipeline import Pipeline


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the user's own module with every tensor whole, on the CPU of rank 0. Collective.

    Nothing on the other ranks, of which a node may have more than it has memory for such copies.
    """
    stages = module.group if isinstance(module, Pipeline) else None
    first = dist.get_global_rank(stages, 0) if stages is not None else 0
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = first == 0 if stages is not None else rank == 0
    weights = {}
    for name, tensor in unwrapped(module).state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            weights[name] = whole.detach().cpu()
    if stages is None or not wanted:
        return weights
    parts: list[dict[str, Tensor] | None] | None = [None] * dist.get_world_size(stages) if rank == 0 else None
    dist.gather_object(weights, parts, dst=first, group=stages)
    return {name: tensor for part in parts or [] if part for name, tensor in part.items()}


def write_weights(folder: Path, name: str, weights: Mapping[str, Tensor]) -> None:
    """folder/<name>.safetensors, complete or absent. Of tied weights the first name alone is written."""
    from safetensors.torch import save_file  # not on the other ranks

    distinct: dict[int, str] = {}
    for key, tensor in weights.items():
        distinct.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), key)
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{name}.safetensors.tmp"
    save_file({key: weights[key].contiguous() for key in distinct.values()}, str(temporary))
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / f"{name}.safetensors")
    fsync_dir(folder)
