"""Batches as datasets and collate functions make them: tensors [n, ...] within dicts, lists and tuples of any depth.

Objects of a library's own, as a batch of graphs, are batches too: with `to(device)` they move themselves; how many
samples they hold is their `num_graphs`, their `batch_size` or their length; and `batch[start:stop]` cuts them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from jobkit.errors import UsageError
from jobkit.run.device_kinds import has_streams


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` of every tensor in it; dicts, lists and tuples, a library's own too, keep their types."""
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it, and every object that has `to`, on `device`.

    From pinned memory to a device with streams the copy goes on beside the program. Others, as mps, would hand out
    tensors whose copy is not complete.
    """
    beside = has_streams(device.type)

    def move(value: Any) -> Any:
        if beside and (isinstance(value, Tensor) or _takes_non_blocking(value)):
            return value.to(device, non_blocking=True)
        return value.to(device)

    return _map(move, batch)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch: every tensor in it cut along its first dimension.

    Raises UsageError for an object that cannot be cut.
    """

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:stop] if value.dim() else value
        if (start, stop) == (0, _samples(value)):
            return value  # all of it
        found = _slice(value, start, stop)
        if not isinstance(found, type(value)):
            raise UsageError(
                f"a batch is a {type(value).__name__}, which cannot be cut into micro-batches: batch[{start}:{stop}] "
                f"is {'an error' if found is None else 'a ' + type(found).__name__}; give it such slices, or leave out "
                "micro_batch_size and have each rank get equally many samples"
            )
        return found

    return _map(part, batch)


def check_can_be_cut(batch: Any, size: int, what: str) -> None:
    """Raise UsageError where a part of a batch of `size` samples is not cut into micro-batches with the others."""
    if isinstance(batch, Tensor):
        if batch.dim() and len(batch) != size:
            raise UsageError(
                f"ctx.backward: {what} has a tensor of {list(batch.shape)} beside {size} samples, and micro-batches "
                "are cut along the first dimension: let the loss have it in another way, as by functools.partial"
            )
    elif isinstance(batch, np.ndarray) or (isinstance(batch, list) and batch and not _has_parts(batch)):
        kind = "an array" if isinstance(batch, np.ndarray) else f"a list of {type(batch[0]).__name__}"
        if np.ndim(batch):
            raise UsageError(
                f"ctx.backward: {what} has {kind}, which is not cut into micro-batches: make it a tensor, or leave out "
                "micro_batch_size"
            )
    elif isinstance(batch, (Mapping, list, tuple)) and not _moves_itself(batch):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            check_can_be_cut(part, size, what)


def _has_parts(batch: list[Any]) -> bool:
    return any(isinstance(one, (Tensor, np.ndarray, Mapping, list, tuple)) or _moves_itself(one) for one in batch)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it, else the samples of the first object.

    Raises UsageError where nothing tells.
    """
    tensors: list[Tensor] = []
    objects: list[Any] = []

    def note(value: Any) -> Any:
        if not isinstance(value, Tensor):
            objects.append(value)
        elif value.dim():
            tensors.append(value)
        return value

    _map(note, batch)
    if not tensors and not objects:
        raise UsageError(
            f"a batch is a {type(batch).__name__} with no tensor in it that tells how many samples it holds: give "
            "ctx.backward a tensor, or a dict, list or tuple with one"
        )
    return len(tensors[0]) if tensors else _samples(objects[0])


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):  # one that torch's pytree does not know, as tokenizers return
            return _with_values(leaf, {key: _map(function, value) for key, value in leaf.items()})
        if _moves_itself(leaf):
            return function(leaf)
        if isinstance(leaf, (list, tuple)):  # a subclass, which it does not know either
            values = [_map(function, value) for value in leaf]
            return type(leaf)(*values) if hasattr(leaf, "_fields") else type(leaf)(values)
        return leaf

    # torch's pytree would look into a tuple with names that moves itself, as a PackedSequence.
    return tree_map(of_leaf, batch, is_leaf=_moves_itself)


def _with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type, attributes and all, as DataLoader makes one where it pins memory."""
    try:
        if isinstance(mapping, MutableMapping):
            found = copy.copy(mapping)
            for name, value in vars(mapping).items() if hasattr(mapping, "__dict__") else ():
                if isinstance(value, MutableMapping) and vars(found).get(name) is value:
                    setattr(found, name, copy.copy(value))  # where it keeps its values, which are the batch's still
            found.update(values)
            return found
        return type(mapping)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def _moves_itself(value: Any) -> bool:
    return callable(getattr(type(value), "to", None)) and not isinstance(value, (type, Mapping, nn.Module))


def _takes_non_blocking(value: Any) -> bool:
    try:
        parameters = inspect.signature(value.to).parameters
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters


def _samples(value: Any) -> int:
    """How many samples an object holds; a batch of graphs has the number of its fields for a length."""
    for name in ("num_graphs", "batch_size"):
        if isinstance(found := getattr(value, name, None), int):
            return found
    if hasattr(type(value), "__len__") and not isinstance(value, tuple):
        return len(value)
    raise UsageError(
        f"a batch is a {type(value).__name__}, which does not tell how many samples it holds: give it a length, or an "
        "attribute batch_size"
    )


def _slice(value: Any, start: int, stop: int) -> Any:
    try:
        return value[start:stop]
    except Exception:
        return None
