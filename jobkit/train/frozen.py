"""Parameters that training leaves as they were: what a checkpoint of the trainable part does without."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jobkit.train.names import module_state, plain_name


class FrozenParameters:
    """Which parameters of some modules need not be saved, as for a LoRA: the training function builds them again.

    Those that require no gradient, have not been changed since the module was tracked, and are in no checkpoint that
    the run was continued from. A momentum encoder, which requires none and is changed by hand, is none of them.
    """

    def __init__(self) -> None:
        self._changes: dict[nn.Module, dict[str, int]] = {}

    def watch(self, module: nn.Module, saved: Collection[str]) -> None:
        """From here on changes count; `saved` are the names in the checkpoint that the module was restored from."""
        found = frozen_parameters(module)
        self._changes[module] = {name: _changes(one) for name, one in found.items() if name not in saved}

    def untouched(self, module: nn.Module) -> list[str]:
        """The names of those of a module."""
        known = self._changes.get(module, {})
        return [name for name, one in frozen_parameters(module).items() if known.get(name) == _changes(one)]

    def complete(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Add to a saved state the module's own frozen parameters, where it was saved without."""
        missing = [name for name in frozen_parameters(module) if name not in state]
        if missing:
            own = module_state(module)
            state.update((name, own[name]) for name in missing)


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that require no gradient, by name."""
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named if not parameter.requires_grad}


def _changes(parameter: nn.Parameter) -> int:
    """How often it was written to."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return parameter._version + (0 if local is parameter else local._version)
