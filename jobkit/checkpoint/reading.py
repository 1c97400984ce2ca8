"""Reads a checkpoint into the live tensors of this rank, and checks while it reads.

    headers: rank 0 --broadcast--> all        pieces: one reader a file --blocks, checked--> live tensors
                                                                        --broadcast--> the other ranks' tensors

Two threads share the work, block by block. A shard of this rank alone is read by this rank alone. On another world
size, or with another layout of DTensors, each rank reads the parts that it needs. sources.py and memory.py read by it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from typing import TypeVar

import torch
import xxhash
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.shard import BLOCK, ShardInfo, Stored
from jobkit.checkpoint.staging import Piece
from jobkit.errors import CheckpointError, OutsideError
from jobkit.weather import nature_of
from jobkit.wire.group import RankGroup, describe

T = TypeVar("T")

CACHED = 512 << 10
"""Bytes that are read and checked at a time."""

IOV_MAX = 1000
"""Buffers of one preadv; Linux allows 1024."""


class Damaged(CheckpointError):
    """A checkpoint does not verify."""


def agreed(ranks: RankGroup, action: Callable[[], T]) -> T:
    """Return the value of an action; where it raises on any rank, raise Damaged, or else CheckpointError, on all.

    Where the disk or the device is to blame, or memory, that rank raises its error, and the others an OutsideError: the
    next attempt may read what this one could not, and nothing is set aside.
    """
    problem, value, weather = None, None, None
    try:
        value = action()
    except Exception as error:  # a CheckpointError, or one of a load_state_dict of the user's
        if nature_of(error) in ("outside", "hardware") or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            weather = error
        kind = OutsideError if weather else Damaged if isinstance(error, (Damaged, OSError)) else CheckpointError
        problem = kind.__name__, str(error) if kind is Damaged else describe(error)
    problems = dict(other for other in ranks.gather(problem) if other is not None)
    if weather is not None:
        raise weather
    for kind in (OutsideError, Damaged, CheckpointError):
        if kind.__name__ in problems:
            raise kind(problems[kind.__name__])
    return value  # type: ignore[return-value]


@dataclass(frozen=True)
class ShardFile:
    """A shard that can be read: a file on the disk, or its place in the memory of a snapshot."""

    file: FileIO
    begin: int
    """The first byte of its data."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from a byte of the data on; returns the bytes read."""
        total = 0
        for begin in range(0, len(buffers), IOV_MAX):
            part = list(buffers[begin : begin + IOV_MAX])
            missing = sum(map(len, part))
            while part:
                count = os.preadv(self.file.fileno(), part, self.begin + offset + total)
                if count == 0:
                    return total
                total += count
                missing -= count
                part = _after(part, count) if missing else []
        return total


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the parts of buffers that are still empty after so many bytes."""
    rest = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
            continue
        rest.append(buffer[count:])
        count = 0
    return rest


@dataclass(frozen=True)
class Target:
    """Bytes of a shard's data, and the memory of a live tensor that they belong to."""

    begin: int
    memory: memoryview


def check_header(name: str, info: ShardInfo, header: bytes) -> None:
    """Raise Damaged for a header that is not as it was written."""
    if len(header) != info.header or xxhash.xxh3_64_hexdigest(header) != info.header_sum:
        raise Damaged(f"{name}: its header is not the one that was written")


def read_targets(
    shard: ShardFile, name: str, info: ShardInfo, targets: Sequence[Target], pool: ThreadPoolExecutor
) -> None:
    """Read parts of a shard into memory, and check every block that they touch. Raises Damaged.

    `targets` are in the order of the file and do not overlap. Bytes of a block that nobody wants are read as well: its
    checksum covers them.
    """
    size = info.size - info.header

    def read(number: int, buffers: Sequence[memoryview]) -> str | None:
        state, position = xxhash.xxh3_64(), number * BLOCK
        for group in _groups(buffers):
            length = sum(map(len, group))
            if shard.read_into(group, position) != length:
                return None
            for buffer in group:
                state.update(buffer)
            position += length
        return state.hexdigest()

    # Each thread reads a part of a block, and checks it while it is in the processor's cache.
    checks = [(number, pool.submit(read, number, buffers)) for number, buffers in _blocks(targets, size)]
    for number, check in checks:
        if check.result() != info.blocks[number]:
            raise Damaged(f"{name}: block {number} of 4 MiB is not the one that was written")


def _groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the buffers of a block in groups of at most CACHED bytes; a larger buffer is cut."""
    group: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), CACHED):
            part = buffer[begin : begin + CACHED]
            if group and size + len(part) > CACHED:
                yield group
                group, size = [], 0
            group.append(part)
            size += len(part)
    if group:
        yield group


def _blocks(targets: Sequence[Target], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the blocks that targets touch, with the memory for each of its bytes in order."""
    current, filled = -1, 0
    buffers: list[memoryview] = []
    for target in targets:
        position, memory = target.begin, target.memory
        while memory:
            number = position // BLOCK
            if number != current:
                if current >= 0:
                    yield current, _filled(buffers, filled, current, size)
                current, filled, buffers = number, number * BLOCK, []
            if position > filled:
                buffers.append(memoryview(bytearray(position - filled)))
            part = memory[: (number + 1) * BLOCK - position]
            buffers.append(part)
            position += len(part)
            filled, memory = position, memory[len(part) :]
    if current >= 0:
        yield current, _filled(buffers, filled, current, size)


def _filled(buffers: list[memoryview], filled: int, number: int, size: int) -> list[memoryview]:
    rest = min((number + 1) * BLOCK, size) - filled
    return [*buffers, memoryview(bytearray(rest))] if rest else buffers


# From pieces to live tensors


class Sink:
    """A live leaf that is being read: CPU memory of its bytes, or a buffer that is copied over at the end.

    Of a sharded tensor it is this rank's box of it, `offset` and the local shape; of any other the whole.
    """

    def __init__(self, name: str, leaf: torch.Tensor) -> None:
        self.name, self.leaf = name, leaf
        self.local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        direct = self.local.device.type == "cpu" and self.local.is_contiguous()
        self.buffer = self.local.detach() if direct else torch.empty(self.local.shape, dtype=self.local.dtype)
        self._memory = self.buffer.view(-1).view(torch.uint8).numpy().data if self.buffer.numel() else memoryview(b"")
        self._is_direct = direct
        self.filled = 0
        """Bytes that pieces have for it."""
        self.offset: tuple[int, ...] | None = None
        """Where this rank's box begins in each dimension; None for a whole leaf."""
        if isinstance(leaf, DTensor):
            box = next(iter(leaf.__create_chunk_list__()), None)  # type: ignore[no-untyped-call]
            self.offset = (0,) * leaf.dim() if box is None else tuple(box.offsets)

    def check(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise CheckpointError where the checkpoint's leaf has another shape or dtype."""
        if tuple(self.leaf.shape) != tuple(shape) or self.leaf.dtype != dtype:
            raise CheckpointError(
                f"{self.name}: the checkpoint has {_form(dtype, shape)}, "
                f"the code {_form(self.leaf.dtype, self.leaf.shape)}"
            )

    def part(self, piece: Piece) -> torch.Tensor:
        """Return the memory of a piece of a whole leaf: a range of its elements, or a box."""
        if piece.offset is not None:
            return self.buffer[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
        flat = self.buffer.view(-1)
        return flat if piece.whole is None else flat[piece.begin : piece.begin + piece.shape[0]]

    def has_same_box(self, piece: Piece) -> bool:
        """Return whether a piece is exactly this rank's part of the leaf."""
        is_whole = piece.whole is None and self.offset is None
        return tuple(self.buffer.shape) == piece.shape and (is_whole or self.offset == piece.offset)

    def target(self, stored: Stored) -> list[Target]:
        """Return the parts of a piece that belong here, and their memory."""
        targets = self._targets(stored)
        self.filled += sum(len(target.memory) for target in targets)
        return targets

    def needs(self, stored: Stored) -> bool:
        """Return whether a part of a piece belongs here."""
        return any(target.memory for target in self._targets(stored))

    def _targets(self, stored: Stored) -> list[Target]:
        piece, size = stored.piece, stored.piece.dtype.itemsize
        if not self.buffer.numel():
            return []
        if self.offset is None and piece.offset is None:
            begin = piece.begin * size
            return [Target(stored.begin, self._memory[begin : begin + piece.nbytes])]
        if piece.offset is None and piece.whole is not None:
            return list(self._of_range(stored))
        return list(self._of_box(stored))

    def _of_box(self, stored: Stored) -> Iterator[Target]:
        """Yield the runs of bytes that a box and this rank's part have in common, contiguous in both."""
        piece, size = stored.piece, stored.piece.dtype.itemsize
        shape, zeros = self.buffer.shape, (0,) * self.buffer.dim()
        offset, origin = self.offset or zeros, piece.offset or zeros
        low = [max(a, b) for a, b in zip(offset, origin, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, origin, piece.shape, strict=True)]
        if any(begin >= end for begin, end in zip(low, high, strict=True)):
            return
        for index, length in _runs(low, high, shape, piece.shape):
            source = _flat([i - o for i, o in zip(index, origin, strict=True)], piece.shape) * size
            begin = _flat([i - o for i, o in zip(index, offset, strict=True)], shape) * size
            yield Target(stored.begin + source, self._memory[begin : begin + length * size])

    def _of_range(self, stored: Stored) -> Iterator[Target]:
        """Yield the runs of this rank's box that lie within a range of the whole's elements."""
        piece, size = stored.piece, stored.piece.dtype.itemsize
        assert self.offset is not None
        assert piece.whole is not None
        low, shape = list(self.offset), self.buffer.shape
        high = [o + n for o, n in zip(low, shape, strict=True)]
        begin_of_run = 0
        for index, length in _runs(low, high, shape, piece.whole):
            first = _flat(index, piece.whole)
            start, stop = max(first, piece.begin), min(first + length, piece.begin + piece.shape[0])
            if start < stop:
                begin = (begin_of_run + start - first) * size
                source = stored.begin + (start - piece.begin) * size
                yield Target(source, self._memory[begin : begin + (stop - start) * size])
            begin_of_run += length

    def finish(self) -> None:
        """Copy a buffer to the device."""
        if not self._is_direct:
            with torch.no_grad():
                self.local.copy_(self.buffer)


def _runs(low: Sequence[int], high: Sequence[int], *shapes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (first index, length) of the runs of a box from `low` to `high` that are contiguous in arrays of all
    `shapes`: whole rows, and whole planes where the box has them whole in every array."""
    cut, length = len(low), 1
    while cut > 0:
        cut -= 1
        extent = high[cut] - low[cut]
        length *= extent
        if any(shape[cut] != extent for shape in shapes):
            break
    for index in itertools.product(*map(range, low[:cut], high[:cut])):
        yield (*index, *low[cut:]), length


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for number, length in zip(index, shape, strict=True):
        position = position * length + number
    return position


def targets_of(pieces: Sequence[Stored], sinks: Mapping[str, Sink]) -> list[Target]:
    """Return the memory for the wanted pieces of a shard, in the order of the file."""
    targets: list[Target] = []
    for stored in pieces:
        sink = sinks.get(stored.piece.name)
        if sink is not None:
            targets += sink.target(stored)
    return sorted((target for target in targets if target.memory), key=lambda target: target.begin)
