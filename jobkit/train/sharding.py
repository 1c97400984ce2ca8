"""One copy of a model shared out over the ranks, block by block: torch's fully_shard ("FSDP2")."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Shard a module's parameters over a mesh, in place, unit by unit (torch's fully_shard, "FSDP2").

    The units are what `module.shard_units()` says, else the children of an nn.Sequential, else the module as a whole.
    With a mesh of two dimensions parameters are copied over the first and sharded over the second.
    """
    units: Iterable[nn.Module] = ()
    if hasattr(module, "shard_units"):
        units = module.shard_units()  # type: ignore[operator]
    elif isinstance(module, nn.Sequential):
        units = [child for child in module if any(True for _ in child.parameters())]
    owned: set[nn.Parameter] = set()
    for unit in units:
        parameters = set(unit.parameters())
        if not parameters & owned:  # a parameter that two units share stays with the whole
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
            owned |= parameters
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)


def reshard(module: nn.Module) -> None:
    """Drop what ranks have gathered of each other's parameters and kept, as zero2 does from one forward to the next.

    Parameters that were changed by hand would otherwise not be seen by the next forward.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
