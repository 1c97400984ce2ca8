"""Styles for a model's `tensor_plan()` beside torch's: layers of attention, which are divided by whole heads."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class DividedHeads(ColwiseParallel):
    """An nn.Linear that makes heads of `features` numbers each, beside one another; each rank makes some of them.

    Where they do not divide by the ranks that is a ValueError, or with `or_whole` each rank makes all of them.
    """

    def __init__(self, features: int, *, or_whole: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.features, self.or_whole = features, or_whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        if _divides(module.out_features // self.features, device_mesh.size(), self.or_whole):
            return super()._apply(module, device_mesh)
        return module


class JoinedHeads(RowwiseParallel):
    """The nn.Linear after attention over the heads of DividedHeads, which takes `features` numbers of each."""

    def __init__(self, features: int, *, or_whole: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.features, self.or_whole = features, or_whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        if _divides(module.in_features // self.features, device_mesh.size(), self.or_whole):
            return super()._apply(module, device_mesh)
        return module


def _divides(heads: int, ranks: int, or_whole: bool) -> bool:
    if heads % ranks and not or_whole:
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ValueError(f"{heads} heads of attention do not divide by {ranks} ranks; possible are {allowed}")
    return heads % ranks == 0
