"""Parameters that training leaves as they were: what a checkpoint of the trainable part does without."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.summary import summarise
from jobkit.train.names import module_state, plain_name


class FrozenParameters:
    """Which parameters of some modules need not be saved, as for a LoRA: the training function builds them again.

    Those that require no gradient, have not been changed since the module was tracked, and are in no checkpoint that
    the run was continued from. A momentum encoder, which requires none and is changed by hand, is none of them.
    """

    def __init__(self) -> None:
        self._known: dict[nn.Module, dict[str, _Kept]] = {}

    def watch(self, module: nn.Module, saved: Collection[str]) -> None:
        """From here on changes count; `saved` are the names in the checkpoint that the module was restored from."""
        self._known[module] = {name: one for name, one in _kept(module).items() if name not in saved}

    def untouched(self, module: nn.Module) -> list[str]:
        """The names of those of a module."""
        known = self._known.get(module, {})
        return [name for name, one in _kept(module).items() if known.get(name) == one] if known else []

    def complete(self, module: nn.Module, state: dict[str, Any], left_out: Collection[str]) -> None:
        """Add to a saved state the module's own parameters that are frozen, or were left out, where it has none."""
        missing = [name for name in {**frozen_parameters(module), **dict.fromkeys(left_out)} if name not in state]
        if missing:
            own = module_state(module)
            state.update((name, own[name]) for name in missing if name in own)


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that require no gradient, by name."""
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named if not parameter.requires_grad}


_Kept = tuple[int, int, int, tuple[str, bytes]]
"""What a parameter is known to be the same by: object, address, how often it was written to, and some elements: writes
through `.data`, as of a momentum encoder, torch does not count."""


def _kept(module: nn.Module) -> dict[str, _Kept]:
    found = frozen_parameters(module)
    with torch.no_grad():
        local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in found.items()}
    elements = summarise(local, most=max(1, len(local)))
    return {
        name: (id(one), _address(local[name]), one._version + local[name]._version, elements[name])
        for name, one in found.items()
    }


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0
