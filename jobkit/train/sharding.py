"""One copy of a model shared out over the ranks, block by block: torch's fully_shard ("FSDP2")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from jobkit.errors import UsageError
from jobkit.run import device_kinds
from jobkit.train.hooks import uncompiled


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Shard a module's parameters over a mesh, in place, unit by unit (`shard_units`), and put them on its device.

    The module may be on the host, where the device would not have room for all of it, or on meta. With a mesh of two
    dimensions parameters are copied over the first and sharded over the second. A unit that shares a parameter with
    something outside it is gathered together with the whole.

    With a `dtype` parameters are gathered in it, and the forward computes as under torch.autocast, called within
    autocast or not; the shards and their gradients are in the parameters' own type, sums over ranks in float32. Norms
    and embeddings, which autocast computes in their own type, are gathered in it.

    With `offload` shards and their gradients are on the host, and so is the optimizer's state.
    """
    _check_can_be_sharded(module)
    keeping = CPUOffloadPolicy(pin_memory=device_kinds.has_streams(mesh.device_type)) if offload else OffloadPolicy()
    shared_out = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=keeping)
    # The inputs of a unit are autocast's to convert: where it keeps a stream in float32, so do the sharded models.
    reduced = torch.float32 if dtype is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    if dtype is not None:
        for owners in _embeddings(module):
            shared_out(owners)
    uses, units = _uses(module), {*shard_units(module), module}
    of_unit = Counter(part for _, part in module.named_modules(remove_duplicate=False))
    for unit in reversed([part for part in module.modules() if part in units]):  # those inside others first
        inside = _uses(unit)
        if isinstance(unit, FSDPModule) or any(uses[one] > inside[one] * of_unit[unit] for one in inside):
            continue
        if dtype is not None and (norms := [part for part in unit.modules() if _is_exact_norm(part)]):
            shared_out(norms)
        _check_is_of_one_type(unit)
        shared_out(unit, mp_policy=policy)
    if dtype is not None:
        module.forward = torch.autocast(mesh.device_type, dtype)(module.forward)


def _check_can_be_sharded(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"parallel: {name} is a scalar, which fully_shard cannot divide: make it a tensor of one element, "
                "nn.Parameter(torch.zeros(1)), or use ddp or zero1"
            )


def _check_is_of_one_type(unit: nn.Module) -> None:
    """Raise UsageError where parameters that are gathered together are of several types: torch's fails later."""
    inside = {one for part in unit.modules() if isinstance(part, FSDPModule) for one in part.parameters()}
    found: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and parameter not in inside:
            found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        (one, first), (two, second) = list(found.items())[:2]
        raise UsageError(
            f"parallel: {type(unit).__name__} has {first} in {one} and {second} in {two}, which fully_shard cannot "
            "gather together: give all of a block one type, name blocks by shard_units(), or use ddp or zero1"
        )


def shard_units(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that are gathered one at a time.

    What its `shard_units()` says; else the classes that Hugging Face's models name in `_no_split_modules`; else the
    children of an nn.Sequential, or, in one that has most of the parameters, its units; else the children of each
    nn.ModuleList.
    """
    if hasattr(module, "shard_units"):
        declared: Iterable[nn.Module] = module.shard_units()  # type: ignore[operator]
        return [uncompiled(unit) for unit in declared]
    if names := getattr(module, "_no_split_modules", None):
        return [part for part in module.modules() if type(part).__name__ in names]
    units: list[nn.Module] = []
    for child in map(uncompiled, module.children()):
        is_list = isinstance(module, nn.ModuleList)
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            units += shard_units(child)
        elif is_list or (isinstance(module, nn.Sequential) and 2 * _size(child) <= _size(module)):
            units.append(child)
        else:
            units += shard_units(child) or ([child] if isinstance(module, nn.Sequential) else [])
    return [unit for unit in units if _size(unit)]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """At how many places in a module each parameter is."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(one for part in parts for one in part._parameters.values() if one is not None)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _embeddings(module: nn.Module) -> list[list[nn.Module]]:
    """Each table of a module, with what else has it as its weight; each is gathered by itself, being large."""
    tables = [part.weight for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    parts = list(module.modules())
    return [
        [part for part in parts if any(one is table for one in part._parameters.values())]
        for table in dict.fromkeys(tables)
    ]


def _is_exact_norm(part: nn.Module) -> bool:
    is_norm = isinstance(part, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) and not isinstance(part, FSDPModule)
    return is_norm and any(True for _ in part.parameters(recurse=False))


def reshard(module: nn.Module) -> None:
    """Drop what ranks have gathered of each other's parameters and kept, as zero2 does from one forward to the next.

    Parameters that were changed by hand would otherwise not be seen by the next forward.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
