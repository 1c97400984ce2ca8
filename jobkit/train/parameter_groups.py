"""An optimizer's parameter groups, of which none mixes parameters that are spread in different ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""What torch's optimizers take: parameters, or groups of them."""

Axes = tuple[str, ...]
"""The axes of the mesh that a parameter is spread over; none for a plain tensor."""


def all_axes(parameters: Parameters) -> list[Axes]:
    """The axes that there are among some parameters, each once."""
    return list(dict.fromkeys(_axes(parameter) for group in _groups(parameters) for parameter in group["params"]))


def divided_by_axes(parameters: Parameters, axes: Iterable[Axes]) -> list[dict[str, Any]]:
    """Parameter groups, divided so that none mixes tensors with DTensors, nor DTensors of different meshes.

    torch's multi-tensor kernels take no mixture. Each of `axes` makes a group, whether there are such parameters or
    not: all stages of a pipeline have equally many groups, as one learning-rate schedule for all of them needs.
    """
    return [
        {**group, "params": [parameter for parameter in group["params"] if _axes(parameter) == one]}
        for group in _groups(parameters)
        for one in axes
    ]


def _groups(parameters: Parameters) -> list[dict[str, Any]]:
    listed: list[Any] = list(parameters)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _axes(parameter: nn.Parameter) -> Axes:
    data = parameter.data
    return tuple(data.device_mesh.mesh_dim_names or ()) if isinstance(data, DTensor) else ()
