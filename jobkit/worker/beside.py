"""What is no part of an object's state, and is needed to restore it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from jobkit.checkpoint.state import flatten, named_tensors, unflatten

Beside = dict[str, Any]
"""Of a module `requires_grad` and `training`, where they were changed in the loop, and `left_out`, the names of the
parameters that its state is without; of another object `on_device`, the paths of what was not on the CPU."""


class OnDevices(NamedTuple):
    """A tree of a checkpoint, which is read back into the host's memory, and the paths of what was not there."""

    tree: Any
    paths: list[str]

    @classmethod
    def of(cls, tree: Any) -> OnDevices:
        return cls(tree, on_device(tree))

    def on(self, device: torch.device) -> Any:
        """The tree as it was, with this device for the other."""
        return on_its_device(self.tree, self.paths, device)


def joined(parts: Iterable[Beside]) -> Beside:
    """That of a whole, where each stage of a pipeline has its own."""
    whole: Beside = {}
    for part in parts:
        for kind, found in part.items():
            whole[kind] = {**whole.get(kind, {}), **found} if isinstance(found, dict) else found
    return whole


def with_training(modes: Mapping[str, dict[str, bool]], firsts: Mapping[str, bool]) -> dict[str, dict[str, bool]]:
    """A rank's own modes where the first rank's are set before them."""
    back = {part: not mode for part, mode in firsts.items()}  # who has not changed it has it as it was made
    return {**modes, "training": {**back, **modes.get("training", {})}}


def on_device(tree: Any) -> list[str]:
    """The paths of the tensors of a state that are not on the CPU: it is read back into the host's memory."""
    return [path for path, tensor in named_tensors(tree).items() if tensor.device.type != "cpu"]


def on_its_device(tree: Any, paths: Collection[str], device: torch.device) -> Any:
    """A state with the tensors of these paths on a device."""
    if not paths:
        return tree
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, {path: one.to(device) if path in paths else one for path, one in tensors.items()})
