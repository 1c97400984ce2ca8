"""The copy the training loop waits for: tensors into host memory that is reused from save to save."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.state import escape, flatten
from jobkit.run.device_kinds import has_streams

_SLAB = 256 << 20  # torch rounds pinned memory up to a power of two: slabs of one waste nothing
_ALIGNMENT = 64  # a cache line, and a multiple of every dtype's size, as a view demands

SHARED, LOCAL = "shared", "local"


def tree_key(kind: str, name: str) -> str:
    """The key of a tree's skeleton; those of its tensors are this, a slash and the tensor's path."""
    return f"{kind}.{escape(name)}"


def local_key(rank: int) -> str:
    """The key of the tree that belongs to one rank."""
    return tree_key(LOCAL, f"{rank:05d}")


Layout = dict[str, tuple[torch.Size, torch.dtype]]


class NoRoom(Exception):
    """A snapshot in memory would take more of the host's memory than it may."""


class HostBuffers:
    """Host memory laid out for one set of tensors; laid out again only when names, shapes or dtypes change.

    `block` gives memory, as uint8 [size], for all tensors in one piece, page-locked for a device where there is one;
    without it they lie in as much private memory as they need.
    """

    def __init__(self, block: Callable[[int, torch.device | None], torch.Tensor] | None = None) -> None:
        self._block = block
        self._layout: Layout = {}
        self._views: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors, complete on return, valid until the next call."""
        devices = {device for device in {tensor.device for tensor in tensors.values()} if has_streams(device.type)}
        self.lay_out({key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}, next(iter(devices), None))
        for device in devices:  # also of streams that the program has made itself
            torch.get_device_module(device).synchronize(device)
        with torch.no_grad():
            for key, tensor in tensors.items():
                # Of other devices, as mps, nothing tells when such a copy is complete.
                self._views[key].copy_(tensor, non_blocking=tensor.device in devices)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        return self._views

    def lay_out(self, layout: Layout, device: torch.device | None) -> None:
        """Take memory for tensors of these shapes and dtypes, which come from a device, unless there is just that."""
        if layout != self._layout:
            self._layout, self._views = {}, {}  # the old memory goes before the new comes
            self._views = _allocate(layout, device, self._block)
            self._layout = dict(layout)


def _allocate(
    layout: Layout, device: torch.device | None, block: Callable[[int, torch.device | None], torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    sizes = {key: shape.numel() * dtype.itemsize for key, (shape, dtype) in layout.items()}
    left = sum(_aligned(size) for size in sizes.values())
    slab, used = block(left, device) if block is not None else torch.empty(0, dtype=torch.uint8), 0
    views = {}
    for key, (shape, dtype) in layout.items():
        if used + sizes[key] > slab.numel():
            slab, used = _memory(max(min(left, _SLAB), sizes[key]), pin=device is not None), 0
        views[key] = slab[used : used + sizes[key]].view(dtype).view(shape)
        used += _aligned(sizes[key])
        left -= _aligned(sizes[key])
    return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _memory(size: int, pin: bool) -> torch.Tensor:
    if pin:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            pass  # the host has no more memory to pin: a slower copy is better than no checkpoint
    block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults in the first copy
    return torch.frombuffer(block, dtype=torch.uint8)


@dataclass
class Staged:
    """This rank's part of one save: what it will write, and what the ranks must agree on."""

    items: list[tuple[WriteItem, torch.Tensor | bytes]] = field(default_factory=list)
    shared: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Of each shared tree, the ranks that hold it and a digest of its names, shapes and dtypes."""
    nbytes: int = 0
    keys: frozenset[str] = frozenset()
    """What the trees that this rank has consist of, be it staged here or on another rank."""
    own: list[str] = field(default_factory=list)
    """The keys of the tensors that are not on every node, which are staged last."""
    layout: Layout = field(default_factory=dict)
    device: torch.device | None = None
    """Where tensors were copied from, unless it is the CPU."""
    no_room: str | None = None
    """Why there is no memory in which it could outlive the rank."""
    problem: str | None = None
    """Why the state could not be copied: makes the save fail on all ranks."""


class Stager:
    """Decides which tensors this rank stages and copies those. It talks to no other rank.

    `ranks_per_node`: how many ranks share a node, numbered node by node. `number`: by which the rank's own tree is
    known, where it is not `rank`.
    """

    def __init__(self, rank: int, world_size: int, ranks_per_node: int = 1, number: int | None = None) -> None:
        self._rank = rank
        self._own = local_key(rank if number is None else number)
        self._world_size = world_size
        self._ranks_per_node = ranks_per_node
        self._owners: dict[str, tuple[tuple[list[int], Sequence[int]], list[int]]] = {}
        self._chunks: dict[str, tuple[Any, list[WriteItem]]] = {}
        self._digests: dict[str, tuple[list[Any], str]] = {}

    def stage(
        self,
        shared: Mapping[str, Any],
        local: Any,
        held_by: Mapping[str, Sequence[int]],
        buffers: HostBuffers,
        *,
        on_each_node: bool = False,
    ) -> Staged:
        """Copy this rank's part of the trees; a failure is a `problem`, for the other ranks to learn of.

        Replicated tensors are divided among the ranks of the world; with `on_each_node` among those of each node, so
        that every node has them all.
        """
        staged = Staged()
        try:
            self._stage(staged, shared, local, held_by, buffers, on_each_node)
        except NoRoom as error:
            staged.no_room = str(error)
        except Exception as error:
            staged.problem = f"the state cannot be copied: {type(error).__name__}: {error}"
        return staged

    def _stage(
        self,
        staged: Staged,
        shared: Mapping[str, Any],
        local: Any,
        held_by: Mapping[str, Sequence[int]],
        buffers: HostBuffers,
        on_each_node: bool,
    ) -> None:
        replicated: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}
        skeletons: dict[str, bytes] = {}
        keys: set[str] = set()
        for name, tree in shared.items():
            prefix = tree_key(SHARED, name)
            holders = held_by.get(name, range(self._world_size))
            skeleton, tensors = flatten(tree)
            staged.shared[prefix] = (tuple(holders), self._digest(prefix, tensors) if self._world_size > 1 else "")
            everywhere = len({self._node(holder) for holder in holders}) * self._ranks_per_node == self._world_size
            if on_each_node:
                holders = [holder for holder in holders if self._node(holder) == self._node(self._rank)]
            if self._rank == holders[0]:
                skeletons[prefix] = skeleton
            keys |= {prefix, *(f"{prefix}/{key}" for key in tensors)}
            for key, tensor in self._owned(prefix, tensors, holders).items():
                kind = replicated if everywhere and not isinstance(tensor, DTensor) else own
                kind[f"{prefix}/{key}"] = tensor
        prefix = self._own
        skeletons[prefix], tensors = flatten(local)
        own.update((f"{prefix}/{key}", tensor) for key, tensor in tensors.items())
        staged.keys, staged.own = frozenset(keys | {prefix, *(f"{prefix}/{key}" for key in tensors)}), list(own)
        self._copy(staged, replicated | own, buffers)
        staged.items.extend((WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), skeletons[key]) for key in skeletons)

    def _copy(self, staged: Staged, tensors: Mapping[str, torch.Tensor], buffers: HostBuffers) -> None:
        with torch.no_grad():
            parts = {
                key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors.items()
            }
        copies = buffers.copy(parts)
        staged.nbytes = sum(copy.nbytes for copy in copies.values())
        staged.layout = {key: (part.shape, part.dtype) for key, part in parts.items()}
        devices = dict.fromkeys(part.device for part in parts.values())  # few, of many thousand tensors
        staged.device = next((device for device in devices if has_streams(device.type)), None)
        staged.items.extend(
            (item, copies[key]) for key, tensor in tensors.items() for item in self._items_of(key, tensor)
        )

    def _node(self, rank: int) -> int:
        return rank // self._ranks_per_node

    def _owned(self, prefix: str, tensors: dict[str, torch.Tensor], holders: Sequence[int]) -> dict[str, torch.Tensor]:
        """The tensors this rank copies: its shard of every DTensor, and its share of the replicated ones."""
        if len(holders) == 1:
            return tensors
        sizes = [0 if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors.values()]
        known = self._owners.get(prefix)
        if known is None or known[0] != (sizes, holders):
            known = self._owners[prefix] = ((sizes, holders), balance(sizes, holders))
        return {
            key: tensor
            for (key, tensor), owner in zip(tensors.items(), known[1], strict=True)
            if owner == self._rank or isinstance(tensor, DTensor)
        }

    def _digest(self, prefix: str, tensors: dict[str, torch.Tensor]) -> str:
        """Of the names, shapes and dtypes of a tree; kept, because to write them down takes longer than to compare."""
        described = [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]
        known = self._digests.get(prefix)
        if known is None or known[0] != described:
            known = self._digests[prefix] = (described, hashlib.blake2b(repr(described).encode()).hexdigest())
        return known[1]

    def _items_of(self, key: str, tensor: torch.Tensor) -> list[WriteItem]:
        """How DCP describes this rank's chunk of a tensor; kept, because a DTensor computes it at some cost."""
        layout: Any = (tensor.shape, tensor.dtype)
        if isinstance(tensor, DTensor):
            layout = (*layout, tensor.device_mesh, tensor.placements)
        known = self._chunks.get(key)
        if known is None or known[0] != layout:
            known = self._chunks[key] = (layout, _write_items(key, tensor))
        return known[1]


def _write_items(key: str, tensor: torch.Tensor) -> list[WriteItem]:
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []  # a mesh of other ranks
        items: list[WriteItem] = tensor.__create_write_items__(key, tensor)
        return items
    origin = torch.Size([0] * tensor.dim())
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=origin, sizes=tensor.shape),
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.shape,
    )
    return [WriteItem(MetadataIndex(key, origin), WriteItemType.TENSOR, tensor_data=data)]


def balance(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Give each size to a rank, the largest first to the rank with the least: the same on every rank that asks."""
    loads = dict.fromkeys(ranks, 0)
    owners = [ranks[0]] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(loads, key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners
