"""Raw bytes for torch.distributed.checkpoint: one file a rank, its checksum taken while it is written."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from jobkit.checkpoint.state import bytes_of
from jobkit.checkpoint.store import FileDigest

_BLOCK = 8 << 20
_LARGE = 1 << 20  # bytes of a tensor that begins at a page, and of memory that is written where it lies
ALIGNMENT = 64  # a cache line, and a multiple of every dtype's size, as a view demands


def begin_at(end: int, size: int) -> int:
    """Where a tensor of so many bytes begins that is put after `end`, in a file as in the memory it is copied to.

    By one rule for both, so that what is one piece of memory is one piece of the file. Writing past the page cache asks
    for whole pages.
    """
    alignment = mmap.PAGESIZE if size >= _LARGE else ALIGNMENT
    return -(-end // alignment) * alignment


@dataclass  # not frozen: thousands of them are made for a restore, and a frozen one takes three times as long
class Extent:
    """Where a saved object lies; a tensor has a shape and a dtype, a pickled object has not."""

    file: str
    offset: int
    length: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


Items = Sequence[tuple[WriteItem, torch.Tensor | bytes]]
Places = list[tuple[MetadataIndex, Extent]]


class ChecksummedFile:
    """A new file, durable when closed without an error.

    Memory is written where it lies, while a thread takes the checksum of it; both do without the GIL. Where the file
    system can, writing bypasses the page cache: that costs less of the processor, is not throttled when the cache is
    full of dirty pages, and leaves the cache to the training data. It asks for whole pages: what is small, or does not
    begin at a page both in memory and in the file, is gathered in a block first.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._crc = 0
        self._fd, self._direct = _open_direct(path)
        self._checksummer = ThreadPoolExecutor(1, "checkpoint-crc")
        self._has_thread = True
        self._summed: ThreadFuture[None] | None = None
        """The last one: those before it are done when it is."""
        self._block = mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self.size, self._crc)

    def write(self, data: memoryview) -> None:
        """Append bytes, which must stay as they are until the file is closed."""
        self.size += len(data)
        if len(data) >= _LARGE and _address(data) % mmap.PAGESIZE == self._used % mmap.PAGESIZE == 0:
            self._flush()
            whole = len(data) - len(data) % mmap.PAGESIZE
            self._append(data[:whole])
            data = data[whole:]
        while data:
            count = min(len(data), _BLOCK - self._used)
            # NumPy lets go of the GIL while it copies; assigning to a slice does not.
            target = np.frombuffer(self._block, np.uint8, count, self._used)
            np.copyto(target, np.frombuffer(data[:count], np.uint8))
            self._used += count
            data = data[count:]
            if self._used == _BLOCK:
                self._flush()

    def _flush(self) -> None:
        """Write what is gathered, and have the block for more."""
        if self._used:
            self._append(memoryview(self._block)[: self._used])
            self._wait()
            self._used = 0

    def _append(self, view: memoryview) -> None:
        if not self._has_thread:
            self._checksum(view)
        else:
            try:
                self._summed = self._checksummer.submit(self._checksum, view)
            except RuntimeError:  # the interpreter is ending, or there may be no more threads
                # For good: where no thread could be started the pool has the work all the same, for the next thread.
                self._has_thread = False
                self._wait()
                self._checksum(view)
        self._write(view)

    def _wait(self) -> None:
        if self._summed is not None:
            self._summed.result()

    def _checksum(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def _write(self, view: memoryview) -> None:
        if len(view) % mmap.PAGESIZE:
            self._through_the_cache()  # the end of the file
        while view:
            try:
                view = view[os.write(self._fd, view[:_BLOCK]) :]  # in parts: a process can be killed between two
            except OSError as error:
                # Refused by the file system or for this memory, or the rest of a part of which only some had room.
                if error.errno not in (errno.EINVAL, errno.EFAULT) or not self._direct:
                    raise
                self._through_the_cache()

    def _through_the_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
                # Bypassing the page cache makes neither the file's size durable nor the disk's own cache.
                os.fsync(self._fd)
                self._wait()
        finally:
            self._checksummer.shutdown(cancel_futures=True)
            os.close(self._fd)


def _open_direct(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666), False


def file_of(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank_{rank:05d}.bin"


def places_of(rank: int, items: Items) -> Places:
    """Where the tensors lie in a rank's file that has these items, tensors first."""
    name, places, end = file_of(rank), [], 0
    for item, value in items:
        if isinstance(value, torch.Tensor):
            start = begin_at(end, value.nbytes)
            places.append((item.index, Extent(name, start, value.nbytes, tuple(value.shape), value.dtype)))
            end = start + value.nbytes
    return places


def write_items(directory: Path, rank: int, items: Items, places: Places) -> tuple[FileDigest, Places]:
    """Write a rank's file, durably: its digest, and where the pickled objects lie.

    The tensors, which come first, are contiguous ones on the CPU, and lie at `places` in the file. torch's
    FileSystemWriter takes no checksum, goes through the page cache and pickles each tensor.
    """
    name, pickled = file_of(rank), []
    with ChecksummedFile(directory / name) as file:
        for offset, memory in _pieces([value for _, value in items[: len(places)]], [extent for _, extent in places]):
            file.write(memoryview(bytes(offset - file.size)))
            file.write(memory)
        for item, value in items[len(places) :]:
            assert isinstance(value, bytes)
            pickled.append((item.index, Extent(name, file.size, len(value))))
            file.write(memoryview(value))
    return file.digest, pickled


def _pieces(tensors: Sequence[Any], places: Sequence[Extent]) -> Iterator[tuple[int, memoryview]]:
    """Offset and memory of those that are as far from each other in memory as in the file, in one piece.

    Few, of thousands of tensors. What lies between two of them, which is less than a page, is written with them.
    """
    offsets = np.array([place.offset for place in places], dtype=np.int64)
    lengths = np.array([place.length for place in places], dtype=np.int64)
    starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    (there,) = np.nonzero(lengths)  # an empty one has no address
    offsets, lengths, starts = offsets[there], lengths[there], starts[there]
    breaks = np.flatnonzero(np.diff(starts - offsets)) + 1
    for piece in np.split(np.arange(len(there)), breaks) if len(there) else []:
        first, last = piece[0], piece[-1]
        yield int(offsets[first]), _memory(int(starts[first]), int(starts[last] + lengths[last]))


def _memory(start: int, end: int) -> memoryview:
    """That between two addresses, which somebody else holds: it may be several tensors'."""
    for_reading = 0x100  # PyBUF_READ
    view: memoryview = _view_of(start, end - start, for_reading)
    return view


_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def read_exactly(file: io.RawIOBase | io.BytesIO, offset: int, target: memoryview) -> None:
    """Fill `target` from the byte at `offset` on; EOFError where the file ends before."""
    file.seek(offset)
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError(f"{getattr(file, 'name', 'what was sent')}: ends before byte {offset + len(target)}")
        target = target[count:]


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    if not tensor.numel():
        return memoryview(b"")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous")
    return bytes_of(tensor).numpy().data
