"""The copy that the training loop waits for: this rank's part of a checkpoint, in host memory that is kept.

    entries --finders--> leaves --divide--> pieces --one _foreach_copy_--> slab (or a slot in memory)
                                                                           |
    loop goes on                                                     Staged, for write_shard

Tensors that all ranks have alike are divided over the ranks by bytes, by a pure function. The layout is worked out
again only when names, shapes or dtypes change. checkpointer.py calls this; nothing here touches a disk.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.leaves import Entry, LeafFinder, Leaves, finder_of, names_of
from jobkit.errors import CheckpointError
from jobkit.wire.group import RankGroup

PAGE = 4096

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of safetensors, by torch's."""

_NOTHING = torch.empty(0)

NAMED = 3
"""Paths of an entry's pickled values that are named: a replay buffer has one for each transition."""

SKELETONS = "__skeletons__"
"""The last tensor of a shard: the plain values of its entries, as JSON."""


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is among the others, for the division of a checkpoint."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    disks: tuple[tuple[int, ...], ...] = ()
    """The ranks by disk, where nodes have disks of their own; empty where all share a disk."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that write to this rank's disk."""
        return next((disk for disk in self.disks if self.rank in disk), tuple(range(self.world_size)))


@dataclass(frozen=True)
class Piece:
    """A part of a leaf that this rank writes: elements `begin` to `end` of a flat tensor, or a box of a DTensor."""

    name: str
    """`<entry>/<path>`; of an entry of this rank alone `<rank>:<entry>/<path>`."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the piece."""
    begin: int = 0
    """First element, where the leaf is divided."""
    whole: tuple[int, ...] | None = None
    """Shape of the leaf, where the piece is a part of it."""
    offset: tuple[int, ...] | None = None
    """Where a box begins in the leaf, in each dimension; None for a range of elements."""

    @property
    def key(self) -> str:
        """The name of the piece in the file."""
        if self.offset is not None:
            return f"{self.name}@{','.join(map(str, self.offset))}"
        return self.name if self.whole is None else f"{self.name}#{self.begin}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Staged:
    """This rank's part of one save: a header and the data after it, as the shard will have them."""

    prefix: str
    """The part of the header that does not change from save to save."""
    tensor_bytes: int
    data: torch.Tensor
    """uint8 [nbytes], page-aligned; valid until the next copy into the same memory."""
    ready: Sequence[torch.cuda.Event] = ()
    """Of each GPU: when its copies have arrived."""
    pickled: list[str] = field(default_factory=list)
    nbytes: int = 0

    @cached_property
    def header(self) -> bytes:
        """The header, a multiple of a page long; the writer's thread makes it, while the loop goes on."""
        return _header(self.prefix, self.tensor_bytes, self.nbytes)

    def wait(self) -> None:
        """Return when the copies of all devices have arrived."""
        for event in self.ready:
            event.synchronize()


def divide(sizes: Sequence[int], parts: int) -> list[list[tuple[int, int, int]]]:
    """Return for each part the (item, begin, end) that it gets, balanced to one element.

    divide([3, 5], 2)      # [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)]]
    """
    total = sum(sizes)
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    before = 0
    for item, size in enumerate(sizes):
        for part in range(parts):
            low, high = total * part // parts, total * (part + 1) // parts
            begin, end = max(low, before), min(high, before + size)
            if begin < end:
                result[part].append((item, begin - before, end - before))
        before += size
    return result


class Stager:
    """Copies a run's state, from save to save into the same memory.

    staged = Stager(RankPosition(), RankGroup.alone()).copy_to_host([Entry(name="model", live=model)])
    """

    def __init__(self, position: RankPosition, ranks: RankGroup) -> None:
        self.position, self.ranks = position, ranks
        self._finders: dict[str, tuple[Entry, LeafFinder]] = {}
        self._forms: dict[str, list[tuple[Any, ...]]] = {}
        """Name, dtype, shape and placement of each leaf, by entry."""
        self._versions: dict[str, tuple[int, int]] = {}
        """The finder of each entry, and its version, at the last copy."""
        self._pieces: list[Piece] = []
        self._numbers: dict[str, list[int]] = {}
        """The pieces of each leaf."""
        self._sources: list[torch.Tensor] = []
        self._passing: list[int] = []
        """The sources that are forgotten after the copy: a gradient would keep its memory until the next one."""
        self._targets: list[torch.Tensor] = []
        self._slab: torch.Tensor | None = None
        self._target: torch.Tensor | None = None
        """The memory that the targets are views of."""
        self._prefix = ""
        self._tensor_bytes = 0
        self._gpus: list[torch.device] = []
        """The devices that the sources lie on: a model may be spread over several GPUs of one rank."""

    @property
    def has_cuda(self) -> bool:
        """True where the copies are to be pinned, which serves all devices: tensors of a GPU are among them."""
        return bool(self._gpus)

    def finders(self, entries: Sequence[Entry]) -> list[tuple[Entry, LeafFinder]]:
        """Return the finder of each entry; it is kept as long as the entry has the same object.

        An optimizer's parameters have the names that the modules known until then give them.
        """
        all_entries = [*(entry for entry, _ in self._finders.values()), *entries]
        modules = [(entry.name, entry.live) for entry in all_entries if isinstance(entry.live, torch.nn.Module)]
        names: dict[int, str] | None = None
        for entry in entries:
            present = self._finders.get(entry.name)
            if present is None or present[0].live is not entry.live:
                names = names_of(modules) if names is None else names
                self._finders[entry.name] = (entry, finder_of(entry, names))
        return [self._finders[entry.name] for entry in entries]

    def copy_to_host(self, entries: Sequence[Entry]) -> Staged:
        """Return this rank's copy of the state, in the kept slab. All ranks call it."""
        staged = self.stage_into(entries, lambda size, header: self._kept(size))
        assert staged is not None
        return staged

    def stage_into(self, entries: Sequence[Entry], memory: Callable[[int, int], torch.Tensor | None]) -> Staged | None:
        """Return this rank's copy of the state, in memory of the caller's. All ranks call it.

        `memory` is asked for page-aligned uint8 memory with the bytes of the data, and of the header that may come
        after them; nothing is copied where it returns None.
        """
        skeletons, pickled = self._look(entries)
        text = json.dumps(skeletons, separators=(",", ":")).encode()
        size = self._tensor_bytes + len(text)
        into = memory(size, len(self._prefix.encode()) + 2 * PAGE)
        ready = None if into is None else self._copy(into)
        for number in self._passing:
            self._sources[number] = _NOTHING
        self._passing = []
        if into is None or ready is None:
            return None
        into[self._tensor_bytes : size] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return Staged(self._prefix, self._tensor_bytes, into[:size], ready, pickled, size)

    def _kept(self, size: int) -> torch.Tensor:
        if self._slab is None or self._slab.numel() < size:
            self._slab = _memory(size + size // 8 + PAGE, self.has_cuda)
        return self._slab

    def _copy(self, into: torch.Tensor) -> list[torch.cuda.Event]:
        if self._target is None or self._target.data_ptr() != into.data_ptr():
            self._targets, begin = [], 0
            with torch.inference_mode(False):  # views made in it could not be copied to once it is left
                for piece in self._pieces:
                    end = begin + piece.nbytes
                    self._targets.append(into[begin:end].view(piece.dtype).view(piece.shape))
                    begin = end
            self._target = into
        if not self._sources:
            return []
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
        # A copy is queued on its source's own device, where another device's event would come before it.
        ready = [torch.cuda.Event() for _ in self._gpus]  # type: ignore[no-untyped-call]
        for event, device in zip(ready, self._gpus, strict=True):
            event.record(torch.cuda.current_stream(device))
        return ready

    def lives(self, entries: Sequence[Entry]) -> dict[str, Leaves]:
        """Return the leaves and plain values of each entry as they are now, by its name."""
        return {entry.name: finder.find() for entry, finder in self.finders(entries)}

    # The layout

    def _look(self, entries: Sequence[Entry]) -> tuple[dict[str, Any], list[str]]:
        """Find the leaves; lay them out again if they changed. Returns the skeletons, and first paths of pickled
        values."""
        skeletons, pickled, lives, changed = {}, [], [], []
        for entry, finder in self.finders(entries):
            live = finder.find()
            lives.append((entry, live))
            if self._versions.get(entry.name) != (id(finder), finder.version):
                self._versions[entry.name] = id(finder), finder.version
                changed.append((entry, live))
            skeletons[_prefix(entry, self.position.rank)] = live.skeleton
            pickled += [f"{entry.name}/{path}" for path in live.pickled[:NAMED]]
        self._lay_out(lives, changed)
        return skeletons, pickled

    def _lay_out(self, lives: Sequence[tuple[Entry, Leaves]], changed: Sequence[tuple[Entry, Leaves]]) -> None:
        """Take new tensors in the place of old ones; where their form is another one, divide all of them again."""
        forms = {entry.name: [_form(path, leaf) for path, leaf in live.tensors.items()] for entry, live in changed}
        is_new = len(lives) != len(self._forms) or any(form != self._forms.get(name) for name, form in forms.items())
        if self.ranks.anywhere(is_new):
            self._divide(list(_named_leaves(lives, self.position.rank)))
            self._forms = {entry.name: [_form(*leaf) for leaf in live.tensors.items()] for entry, live in lives}
            self._sources = [_NOTHING] * len(self._pieces)
            changed = lives
        for entry, live in changed:
            for name, leaf, _ in _named_leaves([(entry, live)], self.position.rank):
                numbers = self._numbers.get(name, [])
                for number in numbers:
                    self._sources[number] = _source(_local(leaf), self._pieces[number])
                if not self._finders[entry.name][1].keeps_leaves:
                    self._passing += numbers
        if changed:
            self._gpus = list(dict.fromkeys(source.device for source in self._sources if source.is_cuda))

    def _divide(self, leaves: Sequence[tuple[str, torch.Tensor, bool]]) -> None:
        """Choose the pieces that this rank writes."""
        shared = {name: leaf for name, leaf, is_own in leaves if not is_own and not isinstance(leaf, DTensor)}
        everywhere, holders = self._holders(list(shared))
        divided = [(name, shared[name]) for name in everywhere]
        peers = self.position.peers
        pieces = []
        own_part = divide([leaf.numel() for _, leaf in divided], len(peers))[peers.index(self.position.rank)]
        for item, begin, end in own_part:
            name, leaf = divided[item]
            if not leaf.is_contiguous() and leaf.numel():
                continue
            pieces.append(_range(name, leaf, begin, end))
        for number, (name, leaf) in enumerate(divided):  # nobody divides what is empty or not contiguous
            if (leaf.numel() == 0 or not leaf.is_contiguous()) and peers[number % len(peers)] == self.position.rank:
                pieces.append(Piece(name, leaf.dtype, tuple(leaf.shape)))
        for name, leaf in shared.items():
            if name in holders and min(set(holders[name]) & set(peers)) == self.position.rank:
                pieces.append(Piece(name, leaf.dtype, tuple(leaf.shape)))
        boxes = [piece for name, leaf, _ in leaves if isinstance(leaf, DTensor) for piece in boxes_of(name, leaf)]
        writers = self._writers([piece.key for piece in boxes])
        pieces += [piece for piece in boxes if writers[piece.key] == self.position.rank]
        pieces += [
            Piece(name, leaf.dtype, tuple(leaf.shape))
            for name, leaf, is_own in leaves
            if is_own and not isinstance(leaf, DTensor)
        ]
        for name, leaf, _ in leaves:
            check_kind(name, leaf)
        # By size of their elements: so each is aligned, and there are no holes, which safetensors refuses.
        self._pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
        self._numbers = {}
        for number, piece in enumerate(self._pieces):
            self._numbers.setdefault(piece.name, []).append(number)
        self._target = None
        self._prefix, self._tensor_bytes = _described(self._pieces)

    def _writers(self, keys: list[str]) -> dict[str, int]:
        """Return, of the parts of sharded tensors that ranks have, which rank of this disk writes each."""
        if not self.ranks.anywhere(bool(keys)):
            return {}
        writers: dict[str, int] = {}
        for rank, present in enumerate(self.ranks.gather(keys)):
            if rank in self.position.peers:
                writers = {**dict.fromkeys(present, rank), **writers}
        return writers

    def _holders(self, names: list[str]) -> tuple[list[str], dict[str, list[int]]]:
        """Return the names that all ranks have, in rank 0's order, and for the others the ranks that have them."""
        if self.ranks.world_size == 1 or not self.ranks.anywhere(
            len(set(self.ranks.gather(xxhash.xxh3_128_digest(repr(names).encode())))) > 1
        ):
            return names, {}
        holders: dict[str, list[int]] = {}
        for rank, present in enumerate(self.ranks.gather(names)):
            for name in present:
                holders.setdefault(name, []).append(rank)
        everywhere = [name for name, ranks in holders.items() if len(ranks) == self.ranks.world_size]
        return everywhere, {name: ranks for name, ranks in holders.items() if len(ranks) < self.ranks.world_size}


def _named_leaves(lives: Sequence[tuple[Entry, Leaves]], rank: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (name in the file, leaf, whether it is this rank's own)."""
    for entry, live in lives:
        for path, leaf in live.tensors.items():
            is_own = entry.scope == "rank" or path in entry.rank_keys
            yield leaf_name(entry.name, path, rank if is_own else None), leaf, is_own


def leaf_name(entry: str, path: str, rank: int | None) -> str:
    """Return the name of a leaf in a checkpoint; `rank` is given for a rank's own."""
    return f"{entry}/{path}" if rank is None else f"{rank}:{entry}/{path}"


def check_kind(name: str, leaf: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor that a shard has no form for."""
    if leaf.dtype not in DTYPES:
        raise CheckpointError(f"{name}: a tensor of {leaf.dtype} cannot be saved")
    if leaf.layout is not torch.strided:
        raise CheckpointError(f"{name}: a tensor of {leaf.layout} cannot be saved")


def _prefix(entry: Entry, rank: int) -> str:
    return f"{rank}:{entry.name}"


def _form(name: str, leaf: torch.Tensor) -> tuple[Any, ...]:
    placements = str(leaf.placements) if isinstance(leaf, DTensor) else leaf.is_contiguous()
    return name, str(leaf.dtype), tuple(leaf.shape), str(leaf.device), placements


def _local(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.to_local().detach() if isinstance(leaf, DTensor) else leaf.detach()


def _source(leaf: torch.Tensor, piece: Piece) -> torch.Tensor:
    if piece.whole is not None and piece.offset is None:
        return leaf.view(-1)[piece.begin : piece.begin + piece.shape[0]]
    return leaf


def _range(name: str, leaf: torch.Tensor, begin: int, end: int) -> Piece:
    if (begin, end) == (0, leaf.numel()):
        return Piece(name, leaf.dtype, tuple(leaf.shape))
    return Piece(name, leaf.dtype, (end - begin,), begin, tuple(leaf.shape))


def boxes_of(name: str, leaf: DTensor) -> Iterator[Piece]:
    """Yield this rank's part of a sharded tensor; nothing where that part is empty."""
    for chunk in leaf.__create_chunk_list__():  # type: ignore[no-untyped-call]
        if math.prod(chunk.sizes):
            yield Piece(name, leaf.dtype, tuple(chunk.sizes), whole=tuple(leaf.shape), offset=tuple(chunk.offsets))


# The header of a shard


def _described(pieces: Sequence[Piece]) -> tuple[str, int]:
    """Return the part of the header that does not change from save to save, and the bytes of the pieces."""
    header: dict[str, Any] = {}
    wholes, begin = {}, 0
    for piece in pieces:
        end = begin + piece.nbytes
        header[piece.key] = {"dtype": DTYPES[piece.dtype], "shape": list(piece.shape), "data_offsets": [begin, end]}
        if piece.whole is not None:
            wholes[piece.key] = [piece.name, piece.begin, list(piece.whole), piece.offset and list(piece.offset)]
        begin = end
    metadata = {"format": "pt", "parts": json.dumps(wholes, separators=(",", ":"))}
    return json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"))[:-1], begin


def _header(prefix: str, begin: int, end: int) -> bytes:
    last = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = f'{prefix},"{SKELETONS}":{json.dumps(last, separators=(",", ":"))}}}'.encode()
    text += b" " * (-(len(text) + 8) % PAGE)  # the data begin at a page: O_DIRECT asks for that
    return len(text).to_bytes(8, "little") + text


def _memory(size: int, pin: bool) -> torch.Tensor:
    """Return page-aligned host memory whose pages exist: the first copy into new memory takes four times as long."""
    if pin:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return torch.frombuffer(block, dtype=torch.uint8)
