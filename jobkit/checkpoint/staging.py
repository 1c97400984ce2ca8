"""The copy the training loop waits for: tensors into host memory that is reused from save to save."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.known_tree import Flat, KnownTree
from jobkit.checkpoint.state import escape
from jobkit.checkpoint.storage import begin_at
from jobkit.run.device_kinds import has_streams

_SLAB = 256 << 20  # torch rounds pinned memory up to a power of two: slabs of one waste nothing

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


@dataclass(frozen=True)
class Copied:
    """What is known of the tensors of a copy; none of it changes."""

    layout: Layout
    devices: tuple[torch.device, ...]
    are_plain: bool
    """Whether they are all dense ones on the CPU, and of no class of its own."""
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Copied:
        layout = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        devices = tuple(dict.fromkeys(tensor.device for tensor in tensors.values()))  # few, of many thousand tensors
        dense = set(map(type, tensors.values())) <= {torch.Tensor, torch.nn.Parameter}
        on_cpu = bool(tensors) and all(device.type == "cpu" for device in devices)
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in layout.values())
        return cls(layout, devices, dense and on_cpu, nbytes)


class HostBuffers:
    """Host memory laid out for one set of tensors; laid out again only when names, shapes or dtypes change.

    `block` gives memory, as uint8 [size], for all tensors in one piece, page-locked for a device where there is one;
    without it they lie in as much private memory as they need.
    """

    def __init__(self, block: Callable[[int, torch.device | None], torch.Tensor] | None = None) -> None:
        self._block = block
        self._layout: Layout = {}
        self._views: dict[str, torch.Tensor] = {}
        self._ordered: list[torch.Tensor] = []
        """The views in the order of the layout."""

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors, complete on return, valid until the next call."""
        return self.copy_as(Copied.of(tensors), list(tensors.values()))

    def copy_as(self, what: Copied, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """`copy` of tensors that are known to be those, in their order."""
        devices = {device for device in what.devices if has_streams(device.type)}
        self.lay_out(what.layout, next(iter(devices), None))
        for device in devices:  # also of streams that the program has made itself
            torch.get_device_module(device).synchronize(device)
        with torch.no_grad():
            if what.are_plain and not devices:  # by one call: of small tensors calls take longer than copies
                torch._foreach_copy_(self._ordered, tensors)
            else:
                for target, tensor in zip(self._ordered, tensors, strict=True):
                    # Of other devices, as mps, nothing tells when such a copy is complete.
                    target.copy_(tensor, non_blocking=tensor.device in devices)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        return self._views

    def lay_out(self, layout: Layout, device: torch.device | None) -> None:
        """Take memory for tensors of these shapes and dtypes, which come from a device, unless there is just that."""
        if layout is self._layout:
            return
        if layout != self._layout:
            self._layout, self._views, self._ordered = {}, {}, []  # the old memory goes before the new comes
            with torch.inference_mode(False):  # what is made in it cannot be copied to once it is left
                self._views = _allocate(layout, device, self._block)
        self._layout, self._ordered = layout, [self._views[key] for key in layout]


def _allocate(
    layout: Layout, device: torch.device | None, block: Callable[[int, torch.device | None], torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    sizes = {key: shape.numel() * dtype.itemsize for key, (shape, dtype) in layout.items()}
    left = sum(_at_most(size) for size in sizes.values())
    slab, used = block(left, device) if block is not None else torch.empty(0, dtype=torch.uint8), 0
    views = {}
    for key, (shape, dtype) in layout.items():
        start = begin_at(used, sizes[key])
        if start + sizes[key] > slab.numel():
            size = min(left, _SLAB) if device is not None else left
            slab, used, start = _memory(max(size, sizes[key]), pin=device is not None), 0, 0
        if start > used:
            slab[used:start].zero_()  # it is written into the checkpoint, too
        views[key] = slab[start : start + sizes[key]].view(dtype).view(shape)
        used = start + sizes[key]
        left -= _at_most(sizes[key])
    return views


def _at_most(size: int) -> int:
    """Bytes that a tensor of so many takes together with those that are left free before it."""
    return size + begin_at(1, size)


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

    described: list[tuple[WriteItem, str]] = field(default_factory=list)
    """Of each tensor, or chunk of one, its key: those that have not changed are the same objects at the next save."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skeletons: dict[str, tuple[WriteItem, Callable[[], bytes]]] = field(default_factory=dict)
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

    @cached_property
    def items(self) -> list[tuple[WriteItem, torch.Tensor | bytes]]:
        """For the writing thread: the loop does not wait for it."""
        items: list[tuple[WriteItem, torch.Tensor | bytes]] = []
        items.extend([(item, self.copies[key]) for item, key in self.described])
        items.extend([(item, skeleton()) for item, skeleton in self.skeletons.values()])
        return items


@dataclass(frozen=True)
class _Plan:
    """What one rank copies of trees of a form: kept for as long as they have it, for it takes longer than the copy."""

    forms: dict[str, object]
    holders: dict[str, tuple[int, ...]]
    picked: list[tuple[str, list[int]]]
    """From which tree which tensors, by their positions, one after the other."""
    has_parts: bool
    """Whether there are DTensors, of which this rank's part is copied."""
    copied: Copied
    described: list[tuple[WriteItem, str]]
    skeletons: dict[str, WriteItem]
    shared: dict[str, tuple[tuple[int, ...], str]]
    keys: frozenset[str]
    own: list[str]

    def is_of(self, flat: Mapping[str, Flat], holders: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the trees have the form, and are held by the ranks, that this was made for."""
        return {prefix: one.form for prefix, one in flat.items()} == self.forms and holders == self.holders

    def chosen(self, flat: Mapping[str, Flat]) -> list[torch.Tensor]:
        """What is copied, of DTensors this rank's part, in the order of the layout."""
        found: list[torch.Tensor] = []
        for prefix, positions in self.picked:
            found += map(flat[prefix].tensors.__getitem__, positions)
        return list(map(_local, found)) if self.has_parts else found


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
        self._trees: dict[str, KnownTree] = {}
        self._plans: dict[bool, _Plan] = {}

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
            with torch.no_grad():
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
        trees = {tree_key(SHARED, name): tree for name, tree in shared.items()}
        holders = {tree_key(SHARED, name): tuple(held_by.get(name, range(self._world_size))) for name in shared}
        trees[self._own] = local
        flat = {prefix: self._trees.setdefault(prefix, KnownTree()).flatten(tree) for prefix, tree in trees.items()}
        plan = self._plans.get(on_each_node)
        if plan is None or not plan.is_of(flat, holders):
            plan = self._plans[on_each_node] = self._plan(flat, holders, on_each_node)
        staged.shared, staged.keys, staged.own = plan.shared, plan.keys, plan.own
        staged.copies = buffers.copy_as(plan.copied, plan.chosen(flat))
        staged.nbytes, staged.layout, staged.described = plan.copied.nbytes, plan.copied.layout, plan.described
        staged.device = next((device for device in plan.copied.devices if has_streams(device.type)), None)
        staged.skeletons = {prefix: (item, flat[prefix].skeleton) for prefix, item in plan.skeletons.items()}

    def _plan(self, flat: Mapping[str, Flat], holders: Mapping[str, tuple[int, ...]], on_each_node: bool) -> _Plan:
        """What this rank copies of these trees."""
        replicated: dict[str, tuple[str, int]] = {}
        own: dict[str, tuple[str, int]] = {}
        skeletons: list[str] = []
        shared: dict[str, tuple[tuple[int, ...], str]] = {}
        for prefix, ranks in holders.items():
            tensors = flat[prefix].tensors
            shared[prefix] = (ranks, self._digest(prefix, flat[prefix]) if self._world_size > 1 else "")
            everywhere = len({self._node(rank) for rank in ranks}) * self._ranks_per_node == self._world_size
            here = ranks
            if on_each_node:
                here = tuple(rank for rank in ranks if self._node(rank) == self._node(self._rank))
            if self._rank == here[0]:
                skeletons.append(prefix)
            for position in self._owned(prefix, tensors, here):
                kind = replicated if everywhere and not isinstance(tensors[position], DTensor) else own
                kind[f"{prefix}/{flat[prefix].names[position]}"] = (prefix, position)
        skeletons.append(self._own)
        mine = flat[self._own]
        own.update((f"{self._own}/{name}", (self._own, position)) for position, name in enumerate(mine.names))
        picked = replicated | own
        tensors_of = {key: flat[prefix].tensors[position] for key, (prefix, position) in picked.items()}
        return _Plan(
            forms={prefix: one.form for prefix, one in flat.items()},
            holders=dict(holders),
            picked=_by_tree(picked),
            has_parts=any(isinstance(tensor, DTensor) for tensor in tensors_of.values()),
            copied=Copied.of({key: _local(tensor) for key, tensor in tensors_of.items()}),
            described=[(item, key) for key, tensor in tensors_of.items() for item in self._items_of(key, tensor)],
            skeletons={key: WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in skeletons},
            shared=shared,
            keys=frozenset(key for prefix, one in flat.items() for key in _keys(prefix, one)),
            own=list(own),
        )

    def _node(self, rank: int) -> int:
        return rank // self._ranks_per_node

    def _owned(self, prefix: str, tensors: Sequence[torch.Tensor], holders: Sequence[int]) -> list[int]:
        """Which tensors this rank copies: its shard of every DTensor, and its share of the replicated ones."""
        if len(holders) == 1:
            return list(range(len(tensors)))
        sizes = [0 if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors]
        known = self._owners.get(prefix)
        if known is None or known[0] != (sizes, holders):
            known = self._owners[prefix] = ((sizes, holders), balance(sizes, holders))
        return [
            position
            for position, (tensor, owner) in enumerate(zip(tensors, known[1], strict=True))
            if owner == self._rank or isinstance(tensor, DTensor)
        ]

    def _digest(self, prefix: str, flat: Flat) -> str:
        """Of the names, shapes and dtypes of a tree; kept, because to write them down takes longer than to compare."""
        described = [(name, tensor.shape, tensor.dtype) for name, tensor in zip(flat.names, flat.tensors, strict=True)]
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


def _by_tree(picked: Mapping[str, tuple[str, int]]) -> list[tuple[str, list[int]]]:
    runs: list[tuple[str, list[int]]] = []
    for prefix, position in picked.values():
        if not runs or runs[-1][0] != prefix:
            runs.append((prefix, []))
        runs[-1][1].append(position)
    return runs


def _keys(prefix: str, flat: Flat) -> list[str]:
    return [prefix, *(f"{prefix}/{name}" for name in flat.names)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
