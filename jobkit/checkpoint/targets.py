"""Where what is read of a checkpoint goes on this rank, as torch.distributed.checkpoint plans it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from jobkit.checkpoint.index import Index
from jobkit.checkpoint.storage import ALIGNMENT, Extent, raw, read_exactly

Taker = str | list[ReadItem]
"""What takes a saved object: a key that has it whole, in new memory, or items that fill parts of tensors with it."""

_TOGETHER = 1 << 20  # bytes of neighbours that are read at once
_ALONE = 64 << 10  # bytes from which on a tensor is read directly: a copy would take longer than a read of its own


class Targets:
    """What this rank takes of a checkpoint, by DCP's key, and in `found` what it has got.

    `live` are tensors to be filled in place; raises what DCP raises for one of another shape than the saved one. `new`
    are keys of which the whole tensor, or an object's bytes, is wanted in memory of its own. DCP plans what of the
    saved tensors fills which tensor here: for one that is new and was saved in one piece there is nothing to plan.
    """

    def __init__(self, live: dict[str, torch.Tensor], new: Iterable[str], index: Index) -> None:
        self.found: dict[str, Any] = dict(live)
        self.whole: list[str] = []
        """Keys that take one saved object whole."""
        for key in new:
            if key in index.divided:
                shape, dtype = index.tensors[key]
                self.found[key] = torch.empty(shape, dtype=dtype)
            else:
                self.whole.append(key)
        self.items: list[ReadItem] = []
        """What fills parts of tensors."""
        if self.found:
            self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._planner.set_up_planner(dict(self.found), index.metadata)
            self.items = self._planner.create_local_plan().items

    def tensor(self, item: ReadItem) -> torch.Tensor:
        """The part of a tensor of this rank that an item fills."""
        target: torch.Tensor = self._planner.resolve_tensor(item)
        return target.detach()


def is_whole(taker: Taker, extent: Extent) -> bool:
    """Whether all of a saved object is wanted."""
    return isinstance(taker, str) or all(tuple(item.lengths) == extent.shape for item in taker)


Run = list[tuple[str, Extent]]
"""Saved objects that are read at once, each with the key that takes it whole."""


def read_whole(file_of: Callable[[Extent], io.RawIOBase | io.BytesIO], runs: Iterable[Run], targets: Targets) -> None:
    """Read saved objects as they are.

    Each tensor gets memory of its own: one that somebody keeps, as an optimizer does, must not hold that of all others,
    nor be saved with them by torch.save.
    """
    for run in runs:
        (key, first), file = run[0], file_of(run[0][1])
        if first.shape is None:
            data = bytearray(first.length)
            read_exactly(file, first.offset, memoryview(data))
            targets.found[key] = bytes(data)
        elif first.length >= _ALONE:
            targets.found[key] = tensor = _empty(first)
            read_exactly(file, first.offset, raw(tensor))
        else:
            last, (_, dtype) = run[-1][1], _described(first)
            block = torch.empty((last.offset + last.length - first.offset) // dtype.itemsize, dtype=dtype)
            read_exactly(file, first.offset, raw(block))
            for (key, extent), tensor in zip(run, _copies(block, run), strict=True):
                shape = extent.shape or ()
                # Not `view`: a view made under no_grad cannot be changed in place outside of it.
                targets.found[key] = tensor if len(shape) == 1 else tensor.resize_(shape)


def _copies(block: torch.Tensor, run: Run) -> Sequence[torch.Tensor]:
    """The tensors of a run, flat, of the block that was read of it."""
    sizes = [extent.length // block.element_size() for _, extent in run]
    if sum(sizes) == block.numel():
        copies: Any = torch.split_with_sizes_copy(block, sizes)  # type: ignore[func-returns-value] # typed as None
        return copies  # type: ignore[no-any-return]
    starts = [(extent.offset - run[0][1].offset) // block.element_size() for _, extent in run]
    return [block[start : start + size].clone() for start, size in zip(starts, sizes, strict=True)]


def runs(wanted: Iterable[tuple[str, Extent]]) -> list[Run]:
    """Of saved objects, in the order of their files, what is read at once.

    That is small tensors of one dtype which lie one after the other, but for what aligns them, and anything else alone.
    """
    found: list[Run] = []
    file, dtype, start, end = "", None, 0, 0
    for pair in wanted:
        extent = pair[1]
        offset, length = extent.offset, extent.length
        if not (
            length < _ALONE
            and 0 <= offset - end < ALIGNMENT
            and end - start < _TOGETHER
            and extent.dtype is dtype
            and dtype is not None
            and not (offset - start) % dtype.itemsize
            and extent.file == file
        ):
            file, start = extent.file, offset
            found.append([])
        found[-1].append(pair)
        dtype, end = extent.dtype if length < _ALONE else None, offset + length
    return found


def read_item(file: io.RawIOBase | io.BytesIO, extent: Extent, item: ReadItem, targets: Targets) -> None:
    """Fill what an item fills from the file in which the saved tensor lies; of a slice only its rows are read."""
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
    """Takes the bytes of a saved object as they come, and has them where they are wanted once it has all.

    One whole tensor on the CPU is filled directly.
    """

    def __init__(self, extent: Extent, taker: Taker, targets: Targets) -> None:
        self._taker, self._targets = taker, targets
        self._left = extent.length
        self._object: torch.Tensor | bytearray | None = None
        """What is being put together: None where the bytes go to their place at once."""
        if extent.shape is None:
            self._object = bytearray(extent.length)
            self._memory = memoryview(self._object)
            return
        if not isinstance(taker, str) and len(taker) == 1 and is_whole(taker, extent):
            target = targets.tensor(taker[0])
            if _takes_bytes(target, _described(extent)[1]):
                self._memory = raw(target)
                return
        self._object = _empty(extent)
        self._memory = raw(self._object)

    def take(self, start: int, data: memoryview) -> bool:
        """Take the bytes from `start` on; whether that were the last."""
        self._memory[start : start + len(data)] = data
        self._left -= len(data)
        if not self._left and self._object is not None:
            self._give(self._object)
        return not self._left

    def _give(self, found: torch.Tensor | bytearray) -> None:
        if isinstance(self._taker, str):
            self._targets.found[self._taker] = found if isinstance(found, torch.Tensor) else bytes(found)
            return
        assert isinstance(found, torch.Tensor)
        for item in self._taker:
            part = _slice(found, tuple(item.storage_offsets), tuple(item.lengths))
            self._targets.tensor(item).copy_(part)


def _described(extent: Extent) -> tuple[tuple[int, ...], torch.dtype]:
    if extent.shape is None or extent.dtype is None:
        raise ValueError(f"{extent.file}: a pickled object where a tensor was expected")
    return extent.shape, extent.dtype


def _empty(extent: Extent) -> torch.Tensor:
    shape, dtype = _described(extent)
    return torch.empty(shape, dtype=dtype)


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype


def _slice(tensor: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
