"""An optimizer's state under the names of its parameters, so that it fits however they are spread over the ranks.

torch.distributed.checkpoint.state_dict cannot carry it: to read the state of an optimizer that has taken no step it
takes one, which a resumed run would count; and it refuses two empty groups, which a pipeline's stages and zero1 have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.train.names import plain_name

Names = dict[nn.Parameter, str]


class Sharded:
    """An optimizer whose state is shared out over the ranks (zero1.py, whose import of torch's takes 0.15 s)."""

    optim: torch.optim.Optimizer
    """The one that has this rank's part."""


def parameter_names(modules: Iterable[nn.Module]) -> Names:
    """The name of each parameter of some modules: as in the module's state_dict; from the second on with its number.

    The modules are the user's own, without what wraps them.
    """
    names: Names = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            plain = plain_name(name)
            names.setdefault(parameter, f"{number}:{plain}" if number else plain)
    return names


def tracked_names(objects: Mapping[str, nn.Module]) -> Names:
    """The names of the parameters of modules that are tracked by a name of their own."""
    named = {key: module.named_parameters() for key, module in objects.items()}
    return {one: f"{key}:{plain_name(name)}" for key, found in named.items() for name, one in found}


def is_torchs_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer of the user's own."""
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    return "ZeroRedundancyOptimizer" in kinds and not isinstance(optimizer, Sharded)


def has_torchs_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state_dict is as torch's own, in which parameters have numbers."""
    if is_torchs_sharded(optimizer):  # which has to be asked for its state on all ranks
        return False
    kind = type(_local(optimizer))
    plain = torch.optim.Optimizer
    if kind.state_dict is plain.state_dict:
        return True
    state = _local(optimizer).state_dict()
    return state.keys() >= {"state", "param_groups"}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of numbers: {state: {name: {...}}, param_groups: [{params: [...]}]}.

    Of a sharded one, this rank's part.
    """
    own = _local(optimizer)
    state = own.state_dict()
    numbered = [names[parameter] for parameter in parameters_of(own)]  # state_dict counts them in this order
    return {
        **state,
        # torch keeps what an optimizer has by keys of its own as it is.
        "state": {numbered[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "param_groups": [
            # A learning-rate schedule changes the outer optimizer's groups; the local ones follow at the next step.
            {**group, **_options(outer), "params": [numbered[number] for number in group["params"]]}
            for group, outer in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, names: Names, state: Mapping[str, Any]) -> None:
    """Take what concerns this rank's parameters from a state by names; ValueError where one of them is not in it."""
    own = _local(optimizer)
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    groups = []
    for group in own.param_groups:
        wanted = [names[parameter] for parameter in group["params"]]
        if missing := [name for name in wanted if name not in saved]:
            raise ValueError(f"it has no parameter {missing[0]!r}")
        groups.append({**_options(saved[wanted[0]] if wanted else group), "params": wanted})
    known = set(names.values()) - {names[parameter] for parameter in parameters_of(optimizer)}
    if lost := [name for name in saved if name in known]:
        raise ValueError(f"it has {lost[0]!r}, which no group of this one has: add_param_group before ctx.track")
    # In the order of the groups: a set's differs from rank to rank, and so would the state that is saved next.
    present = [name for group in groups for name in group["params"] if name in state["state"]]
    of_its_own = [key for key in state["state"] if key not in saved]
    kept = {key: state["state"][key] for key in [*present, *of_its_own]}
    own.load_state_dict({**state, "state": kept, "param_groups": groups})
    by_name = {names[parameter]: parameter for parameter in parameters_of(own)}
    for name in present:  # torch gives state the type of its parameter; master copies have another
        _restore_types(own.state[by_name[name]], state["state"][name])
    if own is not optimizer:  # what a learning-rate schedule changes is the outer one's
        for group in optimizer.param_groups:
            if group["params"]:
                group.update(_options(saved[names[group["params"][0]]]))


def _restore_types(live: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        both = isinstance(value, Tensor) and isinstance(live.get(key), Tensor)
        if both and value.dtype.itemsize > live[key].dtype.itemsize:
            live[key] = value.to(live[key].device)


def placed_like(parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype) -> DTensor | None:
    """An empty DTensor, spread as the parameter is, for a tensor of its state; None where it is to be whole."""
    data = parameter.data
    if not isinstance(data, DTensor) or data.shape != shape:
        return None
    return torch.empty_like(data, dtype=dtype)  # type: ignore[return-value]


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state, which was loaded, the layout in memory of its parameters, as channels-last ones have.

    A checkpoint's tensors are contiguous, and fused kernels pair elements up as they lie in memory.
    """
    own = _local(optimizer)
    for parameter in parameters_of(own):
        state = own.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = laid_out_as(parameter, value)


def laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor of a parameter's shape with its elements in the parameter's order in memory; another as it is."""
    sharded = isinstance(parameter, DTensor) or isinstance(value, DTensor)
    if sharded or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state on this rank."""
    return optimizer.optim if isinstance(optimizer, Sharded) else optimizer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
