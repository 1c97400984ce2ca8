"""Batches as datasets and collate functions make them: tensors [n, ...] in dicts, lists and tuples of any depth.

An object of a library, as a batch of graphs, is a batch too if it has `to(device)`; its samples are its `num_graphs`,
its `batch_size` or its length, and `batch[begin:end]` cuts it. loader.py, accumulation.py and evaluate.py call this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from jobkit.errors import UsageError


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor in it, and every object that has `to`, on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=device.type == "cuda")  # from pinned memory beside the program
        return value.to(device)

    return _map(move, batch)


def as_it_is(batch: Any) -> Any:
    """Return a batch that a dataset has collated already: a `collate_fn` of nothing, which can be pickled."""
    return batch


def cut(batch: Any, begin: int, end: int) -> Any:
    """Return samples `begin` to `end` of a batch: every tensor in it is cut along its first dimension.

    Raises UsageError for an object that cannot be cut.
    """

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[begin:end] if value.dim() else value
        try:
            return value[begin:end]
        except Exception as error:
            raise UsageError(
                f"a batch is a {type(value).__name__}, which cannot be cut into micro-batches ({error}): leave out "
                "micro_batch_size"
            ) from error

    return _map(part, batch)


def check_can_be_cut(batch: Any, size: int, what: str) -> None:
    """Raise UsageError for a tensor whose first dimension is not the samples'."""

    def check(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and len(value) != size:
            raise UsageError(
                f"ctx.backward: {what} has a tensor of {list(value.shape)} beside {size} samples, and micro-batches "
                "are cut along the first dimension: let the loss have it in another way, as by functools.partial"
            )
        return value

    _map(check, batch)


def batch_size(batch: Any) -> int:
    """Return the samples in a batch: the length of its first tensor, else the samples of its first object.

    Raises UsageError where nothing tells.
    """
    sizes: list[int] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor):
            sizes.extend([len(value)] if value.dim() else [])
        elif (size := _samples(value)) is not None:
            sizes.append(size)
        return value

    _map(note, batch)
    if not sizes:
        raise UsageError(
            f"a batch is a {type(batch).__name__}, and nothing in it says how many samples it holds: give ctx.backward "
            "a tensor, or a dict, list or tuple with one"
        )
    return sizes[0]


def _samples(value: Any) -> int | None:
    for name in ("num_graphs", "batch_size"):
        if isinstance(size := getattr(value, name, None), int):
            return size
    return len(value) if hasattr(type(value), "__len__") else None


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch with `function` of every tensor and every object that moves itself."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or _moves_itself(leaf):
            return function(leaf)
        if isinstance(leaf, Mapping):  # a mapping that torch's pytree does not know, as tokenizers return
            return {key: _map(function, value) for key, value in leaf.items()}
        return leaf

    return tree_map(of_leaf, batch, is_leaf=_moves_itself)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(type(value), "to", None)) and not isinstance(value, (type, Mapping, nn.Module))
