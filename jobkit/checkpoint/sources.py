"""A checkpoint that a run can begin with: on the disk, or in the ranks' memory. Reading it is one thing for both.

    Source(manifest, headers, open) --read(entries)--> live tensors, checked; load_state_dict() of the rest

All ranks call `read` together: it succeeds on all of them, or raises the same kind of error on all. checkpointer.py
calls it.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from jobkit.checkpoint import shard
from jobkit.checkpoint.leaves import Entry, LeafFinder
from jobkit.checkpoint.reading import (
    Damaged,
    ShardFile,
    Sink,
    Target,
    agreed,
    check_header,
    read_targets,
    targets_of,
)
from jobkit.checkpoint.shard import ShardInfo, Stored, parse_header
from jobkit.checkpoint.staging import Stager, leaf_name
from jobkit.checkpoint.store import Manifest
from jobkit.errors import CheckpointError
from jobkit.run.files import foreign_owner
from jobkit.wire.group import RankGroup

BUCKET = 32 << 20
"""Bytes of tensors that one broadcast takes along."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, as all ranks know it."""

    manifest: Manifest
    headers: Mapping[str, bytes]
    """Of each shard."""
    open: Callable[[str], AbstractContextManager[ShardFile]]
    """Opens a shard by its name."""
    where: Literal["disk", "memory"]
    path: Path | None = None
    may_unpickle: bool = True
    local: frozenset[str] | None = None
    """In memory: the shards that this rank alone can open; on a disk, None, all ranks can open all."""
    pieces: dict[str, list[Stored]] = field(default_factory=dict)
    """Of each shard, once its header is parsed."""
    skeletons: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each shard, the bytes of its plain values."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def read(self, entries: Sequence[Entry], stager: Stager, ranks: RankGroup) -> None:
        """Read entries into their live objects. Raises Damaged, or CheckpointError where they do not fit; on all ranks.

        `ranks` share the disk, or the memory, that is read from.
        """
        with _without_collections():
            reading = agreed(ranks, lambda: _Reading(self, entries, stager, ranks))
            reading.compare_ranks()
            agreed(ranks, reading.read_checked)
        reading.broadcast()
        agreed(ranks, reading.finish)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Within it, Python does not look for garbage: 10,000 tensors make so many objects that it would take most of the
    time, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def of_disk(folder: Path, ranks: RankGroup) -> Source:
    """Return the checkpoint in a folder, its headers checked. All ranks of the disk call it. Raises Damaged."""

    def look() -> tuple[Manifest, dict[str, bytes], bool]:
        manifest = Manifest.read(folder)
        if manifest is None:
            raise Damaged(f"{folder.name} has no manifest that can be read")
        headers, may_unpickle = {}, True
        for name, info in manifest.shards.items():
            try:
                size = (folder / name).stat().st_size
                with (folder / name).open("rb") as file:
                    headers[name] = file.read(info.header)
            except OSError as error:
                raise Damaged(f"{folder.name}/{name}: {error.strerror}") from error
            if size != info.size:
                raise Damaged(f"{folder.name}/{name} has {size} bytes, and had {info.size} when it was written")
            check_header(f"{folder.name}/{name}", info, headers[name])
            may_unpickle = may_unpickle and foreign_owner(folder / name) is None
        return manifest, headers, may_unpickle

    content = agreed(ranks, lambda: look() if ranks.is_main else None)
    manifest, headers, may_unpickle = ranks.broadcast(content)

    @contextmanager
    def opened(name: str) -> Iterator[ShardFile]:
        with (folder / name).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield ShardFile(file, manifest.shards[name].header)

    return Source(manifest, headers, opened, "disk", folder, may_unpickle)


class _Reading:
    """One reading of some entries from a source, on this rank."""

    def __init__(self, source: Source, entries: Sequence[Entry], stager: Stager, ranks: RankGroup) -> None:
        self.source, self.entries, self.ranks = source, entries, ranks
        self.place = stager.position
        self.finders = stager.finders(entries)
        self.files = shard.names(list(source.manifest.shards))
        for name in self.files:
            if name not in source.pieces:
                source.pieces[name], source.skeletons[name] = parse_header(source.headers[name])
        self.pieces = source.pieces
        same = self.place.world_size == source.manifest.world_size
        self.counterpart = self.place.rank if same else shard.rank_of(self.files[0])
        """The rank of the checkpoint whose own state this rank takes: on another world size that of the disk's first
        rank, rank 0 where all share a disk."""
        self.sinks: dict[str, Sink] = {}
        self.leaves: dict[str, dict[str, torch.Tensor]] = {}
        self._shapes = self._all_shapes()
        self._others: list[str] = []
        """Leaves of the checkpoint that this rank has not: another stage's, or of zero1's other ranks."""
        self._partial: set[str] = set()
        """Leaves that some ranks alone have."""
        self._missing: set[tuple[int, str]] = set()
        """Pieces that this rank needs and cannot open: (number of the file, key)."""
        for entry, finder in self.finders:
            self._adopt(entry, finder)
        self.skeletons: dict[str, Any] = {}

    def _all_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for pieces in self.pieces.values():
            for stored in pieces:
                piece = stored.piece
                shapes[piece.name] = piece.dtype, piece.whole if piece.whole is not None else piece.shape
        return shapes

    def _adopt(self, entry: Entry, finder: LeafFinder) -> None:
        """Find the live tensors of an entry, and refuse a checkpoint that has others."""
        saved: dict[str, str] = {}
        for is_own in (False, True):
            prefix = leaf_name(entry.name, "", self.counterpart if is_own else None)
            saved |= {name[len(prefix) :]: name for name in self._shapes if name.startswith(prefix)}
        if entry.scope == "shared" and self.place.world_size != self.source.manifest.world_size:
            for name in self._shapes:  # buffers of a stage that rank 0 has not
                rank, _, path = name.partition(f":{entry.name}/")
                if path and rank.isdigit():
                    saved.setdefault(path, name)
        live = finder.adopt(None, {path: self._shapes[name] for path, name in saved.items()})
        if missing := [path for path in live.tensors if path not in saved]:
            raise CheckpointError(f"{entry.name}: the checkpoint of step {self.source.step} has no {_joined(missing)}")
        self._others += [name for path, name in saved.items() if path not in live.tensors]
        self.leaves[entry.name] = live.tensors
        for path, leaf in live.tensors.items():
            sink = Sink(saved[path], leaf)
            dtype, shape = self._shapes[saved[path]]
            sink.check(dtype, shape)
            self.sinks[saved[path]] = sink

    def compare_ranks(self) -> None:
        """Find out which leaves some ranks alone have. Raises CheckpointError for one that none has. Collective."""
        if not self.ranks.anywhere(bool(self._others)):
            return
        present = [set(names) for names in self.ranks.gather(list(self.sinks))]
        unknown = sorted(set(self._others).difference(*present))
        if self.ranks.anywhere(bool(unknown)):
            names = next(names for names in self.ranks.gather(unknown) if names)
            raise CheckpointError(
                f"the checkpoint of step {self.source.step} has {_joined(names)}, and the code does not"
            )
        self._partial = set().union(*present) - set.intersection(*present)

    def read_checked(self) -> None:
        """Read this rank's part of the files. Raises Damaged."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            for number, name in enumerate(self.files):
                sinks = {
                    piece: sink
                    for piece, sink in self.sinks.items()
                    if not self._is_shared(piece) or self._reader(number) == self.ranks.rank
                }
                targets = targets_of(self.pieces[name], sinks)
                text = bytearray()
                if name == f"rank_{self.counterpart}.safetensors":
                    begin, end = self.source.skeletons[name]
                    text = bytearray(end - begin)
                    targets = sorted([*targets, Target(begin, memoryview(text))], key=lambda target: target.begin)
                if not targets:
                    continue
                if self.source.local is not None and name not in self.source.local:
                    self._note_missing(number, name, sinks)
                    continue
                info: ShardInfo = self.source.manifest.shards[name]
                with self.source.open(name) as file:
                    read_targets(file, f"step_{self.source.step:08d}/{name}", info, targets, pool)
                if text:
                    self.skeletons = json.loads(text)
        self._check_whole()

    def _check_whole(self) -> None:
        """Raise Damaged for a leaf of which a part is in no file: on another disk, or with a rank that is gone."""
        stored: dict[str, dict[str, int]] = {}
        for pieces in self.pieces.values():
            for piece in (item.piece for item in pieces):
                if piece.whole is not None:
                    stored.setdefault(piece.name, {})[piece.key] = math.prod(piece.shape)
        for name, sink in self.sinks.items():
            if self._is_shared(name):
                is_whole = name not in stored or sum(stored[name].values()) >= sink.buffer.numel()
            else:
                is_whole = sink.filled >= sink.buffer.nbytes
            if not is_whole:
                raise Damaged(f"the checkpoint of step {self.source.step} has only a part of {name} here")

    def _note_missing(self, number: int, name: str, sinks: Mapping[str, Sink]) -> None:
        """Note the pieces that another rank's memory has, where this rank has the same part as that rank."""
        for stored in self.pieces[name]:
            sink = sinks.get(stored.piece.name)
            if sink is None or not sink.needs(stored):
                continue
            if not sink.has_same_box(stored.piece):
                raise Damaged(f"the snapshot of step {self.source.step} divides {stored.piece.name} in another way")
            self._missing.add((number, stored.piece.key))

    def _is_shared(self, name: str) -> bool:
        """True for a leaf that every rank has whole: one rank reads it, and gives it to the others."""
        is_own = name.partition("/")[0].count(":") > 0
        is_whole = name not in self._partial and self.sinks[name].offset is None
        return self.ranks.world_size > 1 and not is_own and is_whole

    def _reader(self, number: int) -> int:
        return number % self.ranks.world_size

    def broadcast(self) -> None:
        """Give the shared leaves that this rank has read to the others, and take theirs."""
        for number, name in enumerate(self.files):
            parts = [
                self.sinks[stored.piece.name].part(stored.piece)
                for stored in self.pieces[name]
                if stored.piece.name in self.sinks and self._is_shared(stored.piece.name)
            ]
            for bucket in _buckets(parts):
                self._broadcast(bucket, self._reader(number))
        if self.source.local is not None:
            self._share_copies()

    def _share_copies(self) -> None:
        """In memory each part is with one rank: give it to the other ranks that have a copy of it (hsdp, zero1)."""
        for number, key in sorted(set().union(*self.ranks.gather(self._missing))):
            (piece,) = [stored.piece for stored in self.pieces[self.files[number]] if stored.piece.key == key]
            sink = self.sinks.get(piece.name)
            if sink is not None and sink.has_same_box(piece):
                part = sink.buffer
            else:
                part = torch.empty(piece.shape, dtype=piece.dtype)
            self._broadcast([part], number)

    def _broadcast(self, parts: list[torch.Tensor], source: int) -> None:
        if len(parts) == 1 and parts[0].is_contiguous():
            dist.broadcast(parts[0], group=self.ranks.group, group_src=source)
            return
        flat = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        dist.broadcast(flat, group=self.ranks.group, group_src=source)
        if self.ranks.rank != source:
            begin = 0
            for part in parts:
                end = begin + part.numel() * part.itemsize
                part.copy_(flat[begin:end].view(part.dtype).view(part.shape))  # a box of a whole tensor has gaps
                begin = end

    def finish(self) -> None:
        """Copy to devices, and give objects their plain values."""
        for sink in self.sinks.values():
            sink.finish()
        for entry, finder in self.finders:
            skeleton = self.skeletons.get(f"{self.counterpart}:{entry.name}")
            finder.finish(skeleton, self.leaves[entry.name], may_unpickle=self.source.may_unpickle)


def _buckets(parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size = BUCKET
    for part in parts:
        if size >= BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(part)
        size += part.numel() * part.itemsize
    return buckets


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
