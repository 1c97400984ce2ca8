"""Batches as datasets and collate functions make them: tensors [n, ...] within dicts, lists and tuples of any depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` of every tensor in it; dicts, lists and tuples, named ones too, keep their types."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # one that torch's pytree does not know, as tokenizers return
            return {key: map_tensors(function, value) for key, value in leaf.items()}
        if isinstance(leaf, (list, tuple)):  # a subclass, which it does not know either
            values = [map_tensors(function, value) for value in leaf]
            return type(leaf)(*values) if hasattr(leaf, "_fields") else type(leaf)(values)
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(of_leaf, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; from pinned memory the copy goes on beside the program."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch: every tensor in it cut along its first dimension."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it; 0 where there is none."""
    lengths: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        lengths.append(len(tensor))
        return tensor

    map_tensors(note, batch)
    return lengths[0] if lengths else 0
