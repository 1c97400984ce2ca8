"""One slot of a snapshot in memory: a file that outlives the rank, and that holds a whole snapshot or none.

    page 0     where the contents' description lies and its checksum: written last; who used the slot last; in the
               first slot how far the rank is (run/slots.py)
    data       this rank's tensors, copied there by the training loop
    guest      tensors of a rank on another node
    contents   what all that is, with a checksum of each part, pickled

A process that is killed leaves what it has written in the file. So the record in page 0 is taken back before anything
else is written, and made again when all of it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import struct
import weakref
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from jobkit.checkpoint.storage import Extent

_RECORD = struct.Struct("<8sQQQI")  # magic; step; of the contents offset, length and checksum; then its own checksum
_OWNER = struct.Struct("<8sQ")  # magic, attempt; then its own checksum
_RECORD_AT, _OWNER_AT, DATA_AT = 0, 64, mmap.PAGESIZE
_MAGIC = b"jobkit-1"
_BLOCK = 8 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: all pages at once take less time than each at its first byte
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class SnapshotId:
    """Which snapshot it is; equal on all ranks that took it together, and never twice."""

    step: int
    """Steps done."""
    timeline: str
    """Random; of the ranks that took it, from their start to their end."""
    number: int
    """Of the saves of that timeline."""


@dataclass(frozen=True)
class Part:
    """What one rank staged for a snapshot, or of that what is not on every node."""

    rank: int
    keys: frozenset[str]
    """Keys of everything that the whole trees consist of, of which the part has some."""
    tensors: list[tuple[WriteItem, Extent]]
    pickled: list[tuple[WriteItem, bytes]]
    start: int = 0
    """Where its bytes begin in the slot's file."""
    length: int = 0
    crc32: int = 0


@dataclass(frozen=True)
class Contents:
    """A snapshot as far as one slot has it."""

    id: SnapshotId
    run: str
    world_size: int
    extra: dict[str, Any]
    """JSON, as in a checkpoint's manifest."""
    parts: list[Part] = field(default_factory=list)


class DamagedSlot(Exception):
    """What a slot says of the snapshot of a step in it does not match its checksum."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Slot:
    """A slot, by its open file."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.data: torch.Tensor
        """This rank's own tensors, uint8 [size]."""
        self.data = self._guest = _NOTHING

    @property
    def bytes_held(self) -> int:
        """Bytes of host memory it takes."""
        return os.fstat(self.file).st_blocks * 512

    # Who used it last

    @property
    def owner(self) -> int | None:
        """The attempt that used it last; None for a new one."""
        found = self._read_struct(_OWNER, _OWNER_AT)
        return None if found is None else int(found[1])

    def set_owner(self, attempt: int) -> None:
        self._write_struct(_OWNER, _OWNER_AT, _MAGIC, attempt)

    # Writing

    def invalidate(self) -> None:
        """From here on it holds no snapshot."""
        os.pwrite(self.file, b"\0" * (_RECORD.size + 4), _RECORD_AT)

    def release(self) -> None:
        """Give its memory back."""
        self.invalidate()
        self.data = self._guest = _NOTHING
        os.ftruncate(self.file, DATA_AT)

    def map_data(self, size: int, device: torch.device | None) -> torch.Tensor:
        """Memory of the file for this rank's own tensors: uint8 [size]. What it was before is no longer used."""
        if self.data.numel():
            self.release()  # of another layout
        self.data = self._map(DATA_AT, size, device)
        return self.data

    def map_guest(self, size: int) -> torch.Tensor:
        """Memory of the file for the tensors of another rank: uint8 [size], at `guest_at`."""
        if self._guest.numel() != size:
            self._guest = self._map(self.guest_at, size, None)
        return self._guest

    @property
    def guest_at(self) -> int:
        return DATA_AT + _pages(self.data.numel())

    def _map(self, start: int, size: int, device: torch.device | None) -> torch.Tensor:
        if not size:
            return _NOTHING
        if os.fstat(self.file).st_size < start + size:
            os.ftruncate(self.file, start + _pages(size))
        block = mmap.mmap(self.file, size, offset=start)
        for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
            with contextlib.suppress(OSError):
                block.madvise(advice)
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        if device is not None:
            _pin(tensor, device)
        return tensor

    def publish(self, contents: Contents) -> None:
        """Hold these contents from here on; their tensors are in the file already."""
        data = pickle.dumps(contents)
        start = self.guest_at + _pages(self._guest.numel())
        if os.pwrite(self.file, data, start) != len(data):
            raise OSError(f"no memory for the {len(data)} bytes that describe the snapshot")
        os.ftruncate(self.file, start + len(data))  # it may have been larger for an attempt before
        self._write_struct(_RECORD, _RECORD_AT, _MAGIC, contents.id.step, start, len(data), zlib.crc32(data))

    # Reading

    def contents(self) -> Contents | None:
        """What it holds, its tensors not verified yet; None where it holds nothing. Raises DamagedSlot."""
        record = self._read_struct(_RECORD, _RECORD_AT)
        if record is None:
            return None
        _, step, start, length, crc32 = record
        data = os.pread(self.file, length, start)
        if zlib.crc32(data) != crc32:
            raise DamagedSlot(step)
        contents: Contents = pickle.loads(data)
        return contents

    def problem(self, part: Part) -> str | None:
        """What is wrong with the tensors of a part; read once."""
        crc, position, block = 0, part.start, memoryview(bytearray(_BLOCK))
        end = part.start + part.length
        while position < end and (count := os.preadv(self.file, [block[: end - position]], position)):
            crc = zlib.crc32(block[:count], crc)
            position += count
        if position != end or crc != part.crc32:
            return f"what rank {part.rank} left has checksum {crc:08x}, not {part.crc32:08x}"
        return None

    def _read_struct(self, kind: struct.Struct, start: int) -> tuple[Any, ...] | None:
        data = os.pread(self.file, kind.size + 4, start)
        body, crc = data[: kind.size], data[kind.size :]
        if len(crc) != 4 or not body.startswith(_MAGIC) or zlib.crc32(body).to_bytes(4, "little") != crc:
            return None
        return kind.unpack(body)

    def _write_struct(self, kind: struct.Struct, start: int, *values: Any) -> None:
        body = kind.pack(*values)
        os.pwrite(self.file, body + zlib.crc32(body).to_bytes(4, "little"), start)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _pin(tensor: torch.Tensor, device: torch.device) -> None:
    """Page-lock mapped memory for copies from a GPU; where that fails the copy is slower, and nothing else."""
    if device.type != "cuda":
        return
    portable = 1  # cudaHostRegisterPortable: for every GPU of this process
    with contextlib.suppress(Exception), torch.cuda.device(device):  # a thread's own device is the first
        runtime, address = torch.cuda.cudart(), tensor.data_ptr()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, tensor.numel(), portable)) == 0:
            weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
        else:
            _forget_error()


def _forget_error() -> None:
    """Take back the error that CUDA keeps of this thread's last call: torch would find it after its next kernel.

    torch has no call for it. There may be several copies of the library, each with an error of its own.
    """
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    loaded = {line.split(maxsplit=5)[-1].strip() for line in maps.splitlines()}
    for file in loaded:
        if Path(file).name.startswith("libcudart"):
            ctypes.CDLL(file).cudaGetLastError()
