"""Where what is read of a checkpoint goes on this rank, as torch.distributed.checkpoint plans it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from jobkit.checkpoint.storage import Extent, raw, read_exactly


class Targets:
    """Tensors to be filled in place and objects to be read as bytes, by DCP's key; `items` says of what is saved.

    Raises what DCP raises for a tensor of another shape than the saved one.
    """

    def __init__(self, state: dict[str, Any], metadata: Metadata) -> None:
        self._state = state
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(state, metadata)
        self.items: list[ReadItem] = self._planner.create_local_plan().items

    def tensor(self, item: ReadItem) -> torch.Tensor:
        """The part of a tensor of this rank that an item fills."""
        target: torch.Tensor = self._planner.resolve_tensor(item)
        return target.detach()

    def put(self, item: ReadItem, data: bytes) -> None:
        """Have an object's bytes where an item wants them."""
        self._state[item.dest_index.fqn] = data


def is_pickled(item: ReadItem) -> bool:
    """Whether an item is no tensor."""
    return item.type == LoadItemType.BYTE_IO


def is_whole(item: ReadItem, extent: Extent) -> bool:
    """Whether an item wants all of a saved object."""
    return is_pickled(item) or tuple(item.lengths) == extent.shape


def read_item(file: io.RawIOBase | io.BytesIO, extent: Extent, item: ReadItem, targets: Targets) -> None:
    """Fill what an item fills from the file in which the saved object lies; of a slice only its rows are read."""
    if is_pickled(item):
        data = bytearray(extent.length)
        read_exactly(file, extent.offset, memoryview(data))
        targets.put(item, bytes(data))
        return
    target = targets.tensor(item)
    if not target.numel():
        return
    shape, dtype = _described(extent)
    starts, lengths, offset = tuple(item.storage_offsets), tuple(item.lengths), extent.offset
    if shape:  # rows are contiguous in the file: read only those asked for
        offset += starts[0] * math.prod(shape[1:]) * dtype.itemsize
        shape, starts = (lengths[0], *shape[1:]), (0, *starts[1:])
    in_place = shape == lengths and _takes_bytes(target, dtype)
    source = target if in_place else torch.empty(shape, dtype=dtype)
    read_exactly(file, offset, raw(source))
    if not in_place:
        target.copy_(_slice(source, starts, lengths))


class Sink:
    """Takes the bytes of a saved object as they come, and fills what this rank's items want of it when it has all.

    Where that is one whole tensor on the CPU it is filled directly.
    """

    def __init__(self, extent: Extent, items: Sequence[ReadItem], targets: Targets) -> None:
        self._extent, self._items, self._targets = extent, items, targets
        self._left = extent.length
        self._object: torch.Tensor | None = None
        """What is being put together: None where the bytes go to their place at once."""
        if len(items) == 1 and is_whole(items[0], extent) and not is_pickled(items[0]):
            target = targets.tensor(items[0])
            if _takes_bytes(target, _described(extent)[1]):
                self._memory = raw(target)
                return
        if extent.shape is None:
            self._object = torch.empty(extent.length, dtype=torch.uint8)
        else:
            self._object = torch.empty(extent.shape, dtype=_described(extent)[1])
        self._memory = raw(self._object)

    def take(self, start: int, data: memoryview) -> bool:
        """Take the bytes from `start` on; whether that were the last."""
        self._memory[start : start + len(data)] = data
        self._left -= len(data)
        if not self._left and self._object is not None:
            for item in self._items:
                if is_pickled(item):
                    self._targets.put(item, bytes(self._memory))
                else:
                    found = _slice(self._object, tuple(item.storage_offsets), tuple(item.lengths))
                    self._targets.tensor(item).copy_(found)
        return not self._left


def _described(extent: Extent) -> tuple[tuple[int, ...], torch.dtype]:
    if extent.shape is None or extent.dtype is None:
        raise ValueError(f"{extent.file}: a pickled object where a tensor was expected")
    return extent.shape, extent.dtype


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype


def _slice(tensor: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
