"""The index of a checkpoint: the Metadata that DCP makes of it, pickled, and the same in columns."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from jobkit.checkpoint.storage import ChecksummedFile, Extent
from jobkit.checkpoint.store import FileDigest
from jobkit.errors import CheckpointError

INDEX = "index.pickle"

Kind = tuple[torch.Size, torch.dtype]


@dataclass
class Index:
    """What a checkpoint has, by DCP's key, and where it lies."""

    tensors: dict[str, Kind]
    """Shape and dtype of each whole tensor."""
    divided: frozenset[str]
    """The tensors that were saved in several chunks."""
    objects: list[str]
    """What is no tensor: the skeleton of each tree."""
    chunks: list[tuple[str, Extent]]
    """Where everything lies, the tensors' chunks in the order of `in_order` and then the objects."""
    read_metadata: Callable[[], Metadata]

    @classmethod
    def of(cls, metadata: Metadata) -> Index:
        """That of DCP's Metadata, with places where it has any."""
        described = metadata.state_dict_metadata
        tensors = {key: one for key, one in described.items() if isinstance(one, TensorStorageMetadata)}
        placed: dict[MetadataIndex, Extent] = metadata.storage_data or {}
        return cls(
            {key: (one.size, one.properties.dtype) for key, one in tensors.items()},
            frozenset(key for key, one in tensors.items() if len(one.chunks) != 1),
            [key for key in described if key not in tensors],
            [(index.fqn, placed[index]) for index in in_order(placed)] + _objects(placed),
            lambda: metadata,
        )

    @cached_property
    def metadata(self) -> Metadata:
        """For DCP to plan with; raises what `parse_metadata` does."""
        return self.read_metadata()

    @cached_property
    def trees(self) -> dict[str, dict[str, Kind]]:
        """The tensors by their path, by tree."""
        trees: dict[str, dict[str, Kind]] = {}
        for key, kind in self.tensors.items():
            tree, _, path = key.partition("/")
            trees.setdefault(tree, {})[path] = kind
        for key in self.objects:
            trees.setdefault(key, {})
        return trees


def in_order(placed: Mapping[MetadataIndex, Extent]) -> list[MetadataIndex]:
    """The chunks of tensors in the order of the files, which is the fastest to read: the same on all ranks."""
    tensors = [index for index, extent in placed.items() if extent.shape is not None]
    return sorted(tensors, key=lambda index: (placed[index].file, placed[index].offset))


def _objects(placed: Mapping[MetadataIndex, Extent]) -> list[tuple[str, Extent]]:
    return [(index.fqn, extent) for index, extent in placed.items() if extent.shape is None]


# The file: the Metadata with the places of tensors, those of objects, the columns, and where the last two begin

_END = struct.Struct("<8sQQ")
_MAGIC = b"columns1"


class IndexOfTensors:
    """What an index says of tensors, as bytes: the same as long as they and their places are."""

    def __init__(self, metadata: Metadata) -> None:
        """`metadata` has the places of tensors alone, and what it says equally of several becomes one object."""
        known: dict[Any, Any] = {}
        described = metadata.state_dict_metadata
        metadata.state_dict_metadata = {key: known.setdefault(_compared(one), one) for key, one in described.items()}
        self.metadata, self.columns = pickle.dumps(metadata), _columns(Index.of(metadata))

    def write(self, directory: Path, objects: Mapping[MetadataIndex, Extent]) -> FileDigest:
        """Write a checkpoint's index, durably, with where its other objects lie."""
        pickled = pickle.dumps(objects)
        end = _END.pack(_MAGIC, len(self.metadata), len(self.metadata) + len(pickled))
        with ChecksummedFile(directory / INDEX) as file:
            for part in (self.metadata, pickled, self.columns, end):
                file.write(memoryview(part))
        return file.digest


def _compared(saved: Any) -> Any:
    """Equal for equal descriptions, and can be a key."""
    if not isinstance(saved, TensorStorageMetadata):
        return id(saved)
    chunks = tuple((chunk.offsets, chunk.sizes) for chunk in saved.chunks)
    return saved.size, chunks, *vars(saved.properties).values()


def _columns(index: Index) -> bytes:
    kinds: dict[Kind, int] = {}
    files: dict[str, int] = {}
    number = {key: position for position, key in enumerate(index.tensors)}
    of_keys = [kinds.setdefault(kind, len(kinds)) for kind in index.tensors.values()]
    of_chunks: tuple[list[int], ...] = [], [], [], []
    for key, extent in index.chunks:
        assert extent.shape is not None and extent.dtype is not None
        kind = kinds.setdefault((torch.Size(extent.shape), extent.dtype), len(kinds))
        row = number[key], kind, files.setdefault(extent.file, len(files)), extent.offset
        for column, value in zip(of_chunks, row, strict=True):
            column.append(value)
    return pickle.dumps(
        (list(kinds), list(files), list(index.tensors), of_keys, sorted(index.divided), index.objects, *of_chunks)
    )


def parse_index(data: bytes) -> Index:
    """The index of a checkpoint; no code of its own is run. Raises ForeignIndex and what pickle raises.

    Of 10,000 tensors DCP's records take ten times as long to read as the columns: with these they are only read where
    DCP is asked. A checkpoint of an older jobkit has no columns.
    """
    magic, objects_at, columns_at = _END.unpack(data[-_END.size :]) if len(data) >= _END.size else (b"", 0, 0)
    if magic != _MAGIC:
        return Index.of(parse_metadata(data))
    kinds, files, keys, of_keys, divided, objects, of_chunks, kinds_of_chunks, files_of_chunks, starts = _load(
        io.BytesIO(data[columns_at : -_END.size])
    )
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
    extents = map(
        Extent,
        _of(files, files_of_chunks),
        starts,
        _of(sizes, kinds_of_chunks),
        _of([shape for shape, _ in kinds], kinds_of_chunks),
        _of([dtype for _, dtype in kinds], kinds_of_chunks),
    )
    return Index(
        dict(zip(keys, _of(kinds, of_keys), strict=True)),
        frozenset(divided),
        objects,
        [*zip(_of(keys, of_chunks), extents, strict=True), *_objects(_load(io.BytesIO(data[objects_at:columns_at])))],
        lambda: parse_metadata(data),
    )


def _of(values: list[Any], numbers: list[int]) -> Iterable[Any]:
    return map(values.__getitem__, numbers)


def parse_metadata(data: bytes) -> Metadata:
    """DCP's Metadata in an index, with the places of everything."""
    stream = io.BytesIO(data)
    metadata: Metadata = _load(stream)
    if stream.tell() < len(data):
        metadata.storage_data |= _load(stream)
    return metadata


def read_metadata(directory: Path) -> Metadata:
    """`parse_metadata` of a checkpoint's index; raises OSError too."""
    return parse_metadata((directory / INDEX).read_bytes())


_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), (Extent.__module__, "Extent")}
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


def _load(stream: io.BytesIO) -> Any:
    return _IndexUnpickler(stream).load()
