"""A model whose parameters are divided over ranks, block by block: torch's fully_shard. spread.py calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from jobkit.checkpoint.live import plain_module
from jobkit.errors import UsageError

EXACT = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag)
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

    Over a mesh of two dimensions parameters are copied over the first and sharded over the second. With a `dtype` they
    are gathered in it and the forward runs under torch.autocast; shards and gradients keep the parameters' type, sums
    over ranks are float32, and what autocast computes in the parameters' type is gathered in it. With `offload` shards,
    gradients and the optimizer's state are in host memory. Raises UsageError for a module that cannot be sharded.
    """
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"parallel: {name} is a scalar, which fully_shard cannot divide: make it a tensor of one element, "
                "nn.Parameter(torch.zeros(1)), or use ddp or zero1"
            )
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "offload_policy": policy}
    reduced = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32, cast_forward_inputs=False
    )
    uses, units = _uses(module), {*shard_units(module), module}
    for unit in reversed([part for part in module.modules() if part in units]):  # inner units first
        if any(uses[parameter] > count for parameter, count in _uses(unit).items()):
            continue  # it shares a parameter with another part: both are gathered with the whole
        if dtype is not None:
            inner = [part for part in unit.modules() if part is not unit and not isinstance(part, FSDPModule)]
            for part in (part for part in inner if isinstance(part, EXACT)):
                direct = list(part.parameters(recurse=False))
                if direct and all(uses[parameter] == 1 for parameter in direct):
                    fully_shard(part, **options)  # type: ignore[call-overload]
        own_type = isinstance(unit, EXACT)
        fully_shard(unit, mp_policy=MixedPrecisionPolicy() if own_type else reduced, **options)  # type: ignore[call-overload]
    if dtype is not None:
        module.forward = torch.autocast(mesh.device_type, dtype)(module.forward)


def shard_units(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that are gathered one at a time.

    `module.shard_units()` names them; else they are the classes in `_no_split_modules` of Hugging Face's models, else
    the children of each nn.ModuleList, and of a module that is an nn.Sequential.
    """
    if hasattr(module, "shard_units"):
        declared: Iterable[nn.Module] = module.shard_units()  # type: ignore[operator]
        units = [plain_module(unit) for unit in declared]
    elif names := getattr(module, "_no_split_modules", None):
        units = [part for part in module.modules() if type(part).__name__ in names]
    else:
        units = list(_blocks(module, isinstance(module, nn.Sequential)))
    return [unit for unit in units if any(True for _ in unit.parameters())]


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
