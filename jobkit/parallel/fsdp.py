"""A model whose parameters are divided over ranks, block by block: torch's fully_shard. parallelizer.py calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from jobkit.checkpoint.leaves import plain_module
from jobkit.errors import UsageError

TABLES = (nn.Embedding, nn.EmbeddingBag)
EXACT = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *TABLES)
"""Modules that torch.autocast computes in the parameters' own type."""


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Shard a module's parameters over a mesh, in place, unit by unit, and put them on the mesh's device.

    The module itself is a unit too, of all that no other has; its forward keeps it gathered.

    Over a mesh of two dimensions parameters are copied over the first and sharded over the second. With a `dtype` they
    are gathered in it, but for the module's own unit and for embeddings, and the forward runs under torch.autocast;
    shards and gradients keep the parameters' type, and sums over ranks are float32. With `offload` shards, gradients
    and the optimizer's state are in host memory. Raises UsageError for a module that cannot be sharded.
    """
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"parallel: {name} is a scalar, which fully_shard cannot divide: make it a tensor of one element, "
                "nn.Parameter(torch.zeros(1)), or use ddp or zero1"
            )
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "offload_policy": place}
    reduced = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32, cast_forward_inputs=False
    )
    uses, declared = _uses(module), set(shard_units(module)) - {module}
    units = [
        unit
        for unit in reversed([part for part in module.modules() if part in declared])  # inner units first
        # What shares a parameter with another part is gathered with the whole.
        if not any(uses[parameter] > count for parameter, count in _uses(unit).items())
    ]
    if dtype is not None:  # a table of words may be large, and is needed only once: it is freed after its lookup
        inside = {part for unit in units for part in unit.modules()}
        tables = [part for part in module.modules() if isinstance(part, TABLES) and part not in inside | {module}]
        units += [part for part in tables if all(uses[parameter] == 1 for parameter in part.parameters())]
    exact = [part for part in module.modules() if isinstance(part, EXACT) and part not in units]

    def apart() -> set[nn.Parameter]:
        """Return the parameters within units that are gathered with the whole, in their own type: a unit for each norm
        would have small messages, and no block would be gathered early."""
        parts = exact if dtype is not None else []
        return {parameter for part in parts for parameter in part.parameters(recurse=False)}

    in_units = {parameter for unit in units for parameter in unit.parameters()} - apart()
    fully_shard(module, ignored_params=in_units, **options)  # type: ignore[call-overload]
    for unit in units:
        policy = MixedPrecisionPolicy() if isinstance(unit, EXACT) else reduced
        fully_shard(unit, mp_policy=policy, ignored_params=apart(), **options)  # type: ignore[call-overload]
    if dtype is not None:
        module.forward = torch.autocast(mesh.device_type, dtype)(module.forward)


def shard_units(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that are gathered one at a time.

    `module.shard_units()` names them; else they are the classes in `_no_split_modules` of Hugging Face's models, else
    the children of each nn.ModuleList, and of a module that is an nn.Sequential, but for norms and embeddings.
    """
    if hasattr(module, "shard_units"):
        declared: Iterable[nn.Module] = module.shard_units()  # type: ignore[operator]
        units = [plain_module(unit) for unit in declared]
    elif names := getattr(module, "_no_split_modules", None):
        units = [part for part in module.modules() if type(part).__name__ in names]
    else:
        units = [unit for unit in _blocks(module, isinstance(module, nn.Sequential)) if not isinstance(unit, EXACT)]
    return [unit for unit in units if any(True for _ in unit.parameters())]


class UnexchangedGradients:
    """Gradients that fully_shard has added up on this rank and not exchanged yet, which no parameter shows.

    `set_requires_gradient_sync(False)` leaves them whole on each rank, and `set_requires_all_reduce(False)` those of
    its replica, until a backward pass exchanges them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._groups: dict[str, Any] = {}
        """What fully_shard gathers together, by name."""
        for name, module in modules.items():
            for path, part in plain_module(module).named_modules():
                if isinstance(part, FSDPModule):
                    state: Any = part._get_fsdp_state()
                    several = hasattr(state, "_fsdp_param_groups")  # torch 2.9 has one
                    groups = state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group])
                    self._groups |= {f"{name}.{path} {number}": group for number, group in enumerate(groups)}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def state_dict(self) -> dict[str, torch.Tensor]:
        gradients = {}
        for name, group in self._groups.items():
            if group._partial_reduce_output is not None:
                gradients[name] = group._partial_reduce_output
            for number, parameter in enumerate(group.fsdp_params):
                whole, gradient = getattr(parameter, "_unsharded_param", None), parameter.unsharded_accumulated_grad
                if gradient is None and whole is not None:
                    gradient = whole.grad
                if gradient is not None:
                    gradients[f"{name}.{number}"] = gradient
        return gradients

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, group in self._groups.items():
            group._partial_reduce_output = _on(group.device, state.get(name))
            for number, parameter in enumerate(group.fsdp_params):
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
                # The next backward pass adds its own to this one, whatever type the sum has.
                parameter.unsharded_accumulated_grad = _on(parameter.device, state.get(f"{name}.{number}"))


def _on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, copy=True)


def _blocks(module: nn.Module, has_blocks: bool) -> Iterator[nn.Module]:
    for child in map(plain_module, module.children()):
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if has_blocks and not is_list:
            yield child
        else:
            yield from _blocks(child, is_list)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return at how many places in a module each parameter is."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(value for part in parts for value in part._parameters.values() if value is not None)
