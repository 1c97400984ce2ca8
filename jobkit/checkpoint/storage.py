"""Raw bytes for torch.distributed.checkpoint: one file a rank, its checksum taken while it is written."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from jobkit.checkpoint.store import FileDigest
from jobkit.errors import CheckpointError

INDEX = "index.pickle"

_BLOCK = 8 << 20
_BLOCKS = 4  # one filling, one being written, one in the checksum, one ready for whichever is faster

_SMALL = 64 << 10  # bytes that are copied sooner than NumPy is asked to


@dataclass(frozen=True)
class Extent:
    """Where a saved object lies; a tensor has a shape and a dtype, a pickled object has not."""

    file: str
    offset: int
    length: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


class ChecksummedFile:
    """A new file, durable when closed without an error.

    Data is gathered in a few blocks; while one fills, another is written and a third goes through the checksum, in
    threads of their own and without the GIL. Where the file system can, blocks bypass the page cache: that costs less
    of the processor, is not throttled when the cache is full of dirty pages, and leaves the cache to the training data.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._crc = 0
        self._fd, self._direct = _open_direct(path)
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._checksummer = ThreadPoolExecutor(1, "checkpoint-crc")
        self._in_flight: deque[tuple[mmap.mmap, list[ThreadFuture[None]]]] = deque()
        self._block = self._take_block()
        self._used = 0

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self.size, self._crc)

    def write(self, data: memoryview) -> None:
        """Append bytes; OSError where those before could not be written."""
        self.size += len(data)
        while data:
            count = min(len(data), _BLOCK - self._used)
            if count <= _SMALL:
                self._block[self._used : self._used + count] = data[:count]
            else:
                # NumPy lets go of the GIL while it copies; assigning to a slice does not.
                target = np.frombuffer(self._block, np.uint8, count, self._used)
                np.copyto(target, np.frombuffer(data[:count], np.uint8))
            self._used += count
            data = data[count:]
            if self._used == _BLOCK:
                self._submit()
                self._block = self._take_block()

    def _take_block(self) -> mmap.mmap:
        if len(self._in_flight) < _BLOCKS - 1:
            # Whole pages, as bypassing the cache asks for.
            return mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block, jobs = self._in_flight.popleft()
        for job in jobs:
            job.result()
        return block

    def _submit(self) -> None:
        view = memoryview(self._block)[: self._used]
        jobs = [self._start(self._writer, self._write, view), self._start(self._checksummer, self._checksum, view)]
        self._in_flight.append((self._block, jobs))
        self._used = 0

    def _start(
        self, pool: ThreadPoolExecutor, action: Callable[[memoryview], None], view: memoryview
    ) -> ThreadFuture[None]:
        """Run in the pool, or at once where the interpreter is ending: a pool takes no more work then."""
        try:
            return pool.submit(action, view)
        except RuntimeError:
            # What the pool has taken comes first: else a block is written, and summed up, before the one it follows.
            wait([job for _, jobs in self._in_flight for job in jobs])
            done: ThreadFuture[None] = ThreadFuture()
            try:
                action(view)
                done.set_result(None)
            except OSError as error:
                done.set_exception(error)
            return done

    def _write(self, view: memoryview) -> None:
        if len(view) % mmap.PAGESIZE:
            self._through_the_cache()  # the end of the file
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                # Refused by the file system, or the rest of a block of which only a part had room.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_the_cache()

    def _through_the_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False

    def _checksum(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._submit()
                for _, jobs in self._in_flight:
                    for job in jobs:
                        job.result()
                # Bypassing the page cache makes neither the file's size durable nor the disk's own cache.
                os.fsync(self._fd)
        finally:
            self._writer.shutdown(cancel_futures=True)
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


def write_items(
    directory: Path, rank: int, items: Sequence[tuple[WriteItem, torch.Tensor | bytes]]
) -> tuple[FileDigest, list[tuple[MetadataIndex, Extent]]]:
    """Write a rank's file, durably: its digest, and where each item lies, in the order given.

    torch's FileSystemWriter takes no checksum, goes through the page cache and pickles each tensor.
    """
    name, extents = file_of(rank), []
    with ChecksummedFile(directory / name) as file:
        for item, value in items:
            if isinstance(value, bytes):
                data = memoryview(value)
                extent = Extent(name, file.size, len(data))
            else:
                data = _bytes_of(value)
                extent = Extent(name, file.size, len(data), tuple(value.shape), value.dtype)
            extents.append((item.index, extent))
            file.write(data)
    return file.digest, extents


def write_index(directory: Path, tensors: bytes, pickled: Mapping[MetadataIndex, Extent]) -> FileDigest:
    """Write a checkpoint's index, durably: the pickled Metadata of its tensors, then where its other objects lie."""
    with ChecksummedFile(directory / INDEX) as file:
        file.write(memoryview(tensors))
        file.write(memoryview(pickle.dumps(pickled)))
    return file.digest


_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), (__name__, "Extent")}
"""What an index consists of, beside torch's dtypes and what torch.distributed.checkpoint.metadata defines."""


def _is_part_of_an_index(module: str, name: str) -> bool:
    if module == metadata_module.__name__:  # of whichever torch: records and enumerations, which do nothing
        kind = getattr(metadata_module, name, None)
        return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, (Enum, tuple)))
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return is_dtype or (module, name) in _NAMES


class ForeignIndex(CheckpointError):
    """A checkpoint's index that names what no index has: it would have run code."""


def _member(kind: Any, name: Any) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__):
        raise ForeignIndex(f"{INDEX} names {kind!r}.{name}, which no index has")
    return kind.__members__[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _is_part_of_an_index(module, name):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # by which some Pythons, as 3.11.2, write down a member of an Enum
        raise ForeignIndex(f"{INDEX} names {module}.{name}, which no index has")


def parse_index(data: bytes) -> Metadata:
    """The index of a checkpoint; no code of its own is run. Raises ForeignIndex and what pickle raises."""
    stream = io.BytesIO(data)
    metadata: Metadata = _IndexUnpickler(stream).load()
    if stream.tell() < len(data):
        metadata.storage_data |= _IndexUnpickler(stream).load()
    return metadata


def read_index(directory: Path) -> Metadata:
    """`parse_index` of a checkpoint's; raises OSError too."""
    return parse_index((directory / INDEX).read_bytes())


def read_exactly(file: io.RawIOBase | io.BytesIO, offset: int, target: memoryview) -> None:
    """Fill `target` from the byte at `offset` on; EOFError where the file ends before."""
    file.seek(offset)
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError(f"{getattr(file, 'name', 'what was sent')}: ends before byte {offset + len(target)}")
        target = target[count:]


def _bytes_of(value: torch.Tensor) -> memoryview:
    is_plain = value.is_cpu and value.is_contiguous() and not (value.requires_grad or value.is_conj() or value.is_neg())
    return raw(value if is_plain else value.detach().cpu().resolve_conj().resolve_neg().contiguous())


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(-1).view(torch.uint8).numpy().data
