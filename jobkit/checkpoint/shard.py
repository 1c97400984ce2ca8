"""rank_<n>.safetensors: one rank's part of a checkpoint, and its checksums.

    Staged --write_shard--> file: header (whole pages) | tensors | skeletons          ShardInfo --> manifest

Any program that reads safetensors can open it. The header's checksum and one for each 4 MiB of data are in the
manifest, so that a reader of a few bytes reads only their block to check them. checkpointer.py writes with this, in a
thread; reading.py reads with it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jobkit.checkpoint.staging import DTYPES, PAGE, SKELETONS, Piece, Staged

BLOCK = 4 << 20
"""Bytes of data that a checksum covers."""

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class ShardInfo:
    """The facts of a shard that the manifest keeps."""

    size: int
    """Bytes of the file."""
    header: int
    """Bytes before the data."""
    header_sum: str
    blocks: tuple[str, ...]
    """Checksums of the data, block by block: xxh3_64 in hex."""

    def as_json(self) -> dict[str, Any]:
        return {"size": self.size, "header": self.header, "header_sum": self.header_sum, "blocks": "".join(self.blocks)}

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> ShardInfo:
        text = value["blocks"]
        blocks = tuple(text[begin : begin + 16] for begin in range(0, len(text), 16))
        return cls(value["size"], value["header"], value["header_sum"], blocks)


def write_shard(file: Path, staged: Staged) -> ShardInfo:
    """Write a shard, and return when the disk has it. Raises OSError."""
    staged.wait()
    return write_parts(file, staged.header, staged.data.numpy().data)


def write_parts(file: Path, head: bytes, data: memoryview) -> ShardInfo:
    """Write a shard from its header and its data, and return when the disk has it. Raises OSError."""
    info = sums_of(head, data)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
    except OSError:  # tmpfs before Linux 6.6 and some network file systems have no O_DIRECT
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        header = mmap.mmap(-1, len(head))  # page-aligned, as O_DIRECT asks for
        header[:] = head
        _write_all(descriptor, memoryview(header))
        whole = len(data) // PAGE * PAGE
        for begin in range(0, whole, BLOCK):
            _write_all(descriptor, data[begin : min(begin + BLOCK, whole)])
    finally:
        os.close(descriptor)
    with file.open("ab") as rest:
        rest.write(data[whole:])
        rest.flush()
        os.fsync(rest.fileno())
    return info


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sums_of(header: bytes, data: memoryview) -> ShardInfo:
    """Return the facts of a shard that is in memory."""
    blocks = tuple(xxhash.xxh3_64_hexdigest(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))
    return ShardInfo(len(header) + len(data), len(header), xxhash.xxh3_64_hexdigest(header), blocks)


@dataclass(frozen=True)
class Stored:
    """A piece in a shard, and where it lies."""

    piece: Piece
    begin: int
    """First byte, from the beginning of the data."""

    @property
    def end(self) -> int:
        return self.begin + self.piece.nbytes


def parse_header(header: bytes) -> tuple[list[Stored], tuple[int, int]]:
    """Return the pieces of a shard in the order of the file, and the range of its skeletons."""
    values = json.loads(header[8:])
    parts = json.loads(values.pop("__metadata__")["parts"])
    skeletons = values.pop(SKELETONS)["data_offsets"]
    pieces = []
    for key, value in values.items():
        name, begin, whole, offset = parts.get(key, (key, 0, None, None))
        shape = tuple(value["shape"])
        piece = Piece(
            name,
            _TORCH[value["dtype"]],
            shape,
            begin,
            None if whole is None else tuple(whole),
            None if offset is None else tuple(offset),
        )
        pieces.append(Stored(piece, value["data_offsets"][0]))
    return pieces, (skeletons[0], skeletons[1])


def rank_of(file: str) -> int:
    """Return the rank that wrote a shard file."""
    return int(file.removeprefix("rank_").removesuffix(".safetensors"))


def names(files: Sequence[str]) -> list[str]:
    """Return shard files in the order of their ranks."""
    return sorted(files, key=rank_of)
