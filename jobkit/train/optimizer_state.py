"""An optimizer's state under the names of its parameters, so that it fits however they are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

Names = dict[nn.Parameter, str]
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def parameter_names(modules: Iterable[nn.Module]) -> Names:
    """The name of each parameter of some modules: as in the module's state_dict; from the second on with its number.

    The modules are the user's own, without what wraps them.
    """
    names: Names = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, f"{number}:{name}" if number else name)
    return names


def local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state on this rank: the one inside torch's ZeroRedundancyOptimizer."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of numbers: {state: {name: {...}}, param_groups: [{params: [...]}]}.

    Of a ZeroRedundancyOptimizer, this rank's part.
    """
    own = local(optimizer)
    state = own.state_dict()
    numbered = _numbers(own, state)
    return {
        **state,
        "state": {names[numbered[number]]: value for number, value in state["state"].items()},
        "param_groups": [
            # A learning-rate schedule changes the outer optimizer's groups; the local ones follow at the next step.
            {**group, **_options(outer), "params": [names[numbered[number]] for number in group["params"]]}
            for group, outer in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, names: Names, state: Mapping[str, Any]) -> None:
    """Take what concerns this rank's parameters from a state by names; ValueError where one of them is not in it."""
    own = local(optimizer)
    current = own.state_dict()
    numbered = _numbers(own, current)
    options = {name: group for group in state["param_groups"] for name in group["params"]}
    groups = []
    for group in current["param_groups"]:
        wanted = [names[numbered[number]] for number in group["params"]]
        if missing := [name for name in wanted if name not in options]:
            raise ValueError(f"it has no parameter {missing[0]!r}")
        saved = options[wanted[0]] if wanted else group
        groups.append({**saved, "params": group["params"]})
    own.load_state_dict(
        {
            **state,
            "state": {
                number: state["state"][names[parameter]]
                for number, parameter in numbered.items()
                if names[parameter] in state["state"]
            },
            "param_groups": groups,
        }
    )
    if own is not optimizer:  # what a learning-rate schedule changes is the outer one's
        for group in optimizer.param_groups:
            if group["params"]:
                group.update(_options(options[names[group["params"][0]]]))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def placed_like(parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype) -> DTensor | None:
    """An empty DTensor, spread as the parameter is, for a tensor of its state; None where it is to be whole."""
    data = parameter.data
    if not isinstance(data, DTensor) or data.shape != shape:
        return None
    return torch.empty_like(data, dtype=dtype)  # type: ignore[return-value]


def _numbers(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """The parameter that each number in an optimizer's state_dict stands for."""
    return {
        number: parameter
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
        for number, parameter in zip(saved["params"], group["params"], strict=True)
    }


Kind = tuple[str, ...]
"""Axes of the mesh that a parameter is spread over; empty for a plain tensor."""


def kinds_of(parameters: Parameters) -> list[Kind]:
    """The kinds there are among some parameters, each once."""
    return list(dict.fromkeys(_kind(parameter) for group in _groups(parameters) for parameter in group["params"]))


def by_kind(parameters: Parameters, kinds: Iterable[Kind]) -> list[dict[str, Any]]:
    """Parameter groups, divided so that none mixes tensors with DTensors, nor DTensors of different meshes.

    torch's multi-tensor kernels take no mixture. Each of `kinds` makes a group, whether there are such parameters or
    not: all stages of a pipeline have equally many groups, as one learning-rate schedule for all of them needs.
    """
    return [
        {**group, "params": [parameter for parameter in group["params"] if _kind(parameter) == kind]}
        for group in _groups(parameters)
        for kind in kinds
    ]


def _groups(parameters: Parameters) -> list[dict[str, Any]]:
    listed: list[Any] = list(parameters)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _kind(parameter: nn.Parameter) -> Kind:
    data = parameter.data
    return tuple(data.device_mesh.mesh_dim_names or ()) if isinstance(data, DTensor) else ()
