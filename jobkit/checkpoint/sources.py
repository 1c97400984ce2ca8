"""Where a checkpoint is read from, on all ranks together: the files of one on the disk, or a snapshot in memory.

What several ranks need is read by one of them and sent to the others.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from jobkit.checkpoint.index import Index, in_order
from jobkit.checkpoint.memory import Snapshot
from jobkit.checkpoint.storage import Extent, read_exactly
from jobkit.checkpoint.targets import Run, Sink, Taker, Targets, is_whole, read_item, read_whole, runs
from jobkit.checkpoint.transfer import Transfer, send_all
from jobkit.group import RankGroup

Ranks = tuple[int, ...]
FileOf = Callable[[Extent], io.RawIOBase | io.BytesIO]

_PIECE = 64 << 20  # bytes that are worth a thread; small tensors, which need the GIL, come to less
_THREADS = 4


class Source(Protocol):
    """What a checkpoint is read from."""

    index: Index

    def read(self, targets: Targets) -> None:
        """Fill the targets of all ranks; collective, and what goes wrong on one is raised on all."""


class DiskSource:
    """The files of a verified checkpoint: each byte is read by one rank, unless ranks want other rows of one."""

    def __init__(self, directory: Path, index: Index, ranks: RankGroup) -> None:
        self.index = index
        self._directory, self._ranks = directory, ranks
        self._chunks = index.chunks
        self._numbers = _Numbers([key for key, _ in self._chunks], lambda: in_order(index.metadata.storage_data))

    def read(self, targets: Targets) -> None:
        takers = self._numbers.takers(targets)
        wanted: dict[int, Ranks] = {}
        if self._ranks.world_size > 1:
            whole = [number for number, taker in takers.items() if is_whole(taker, self._chunks[number][1])]
            wanted = {
                number: ranks
                for number, ranks in _wanted(self._ranks, len(self._chunks), whole).items()
                if len(ranks) > 1 and self._chunks[number][1].length
            }
        own = takers.keys() - {number for number, ranks in wanted.items() if self._ranks.rank in ranks}
        mine = [(takers[number], self._chunks[number][1]) for number in sorted(own)]
        with ExitStack() as opened:
            files = _Files(self._directory, opened)
            self._ranks.all_or_none(lambda: _read_own(lambda opened: _Files(self._directory, opened).of, mine, targets))
            _send(
                self._ranks,
                [(number, ranks, ranks) for number, ranks in wanted.items()],
                lambda number: self._chunks[number][1],
                lambda number, start, data: files.read(self._chunks[number][1], start, data),
                takers,
                targets,
            )


class MemorySource:
    """A verified snapshot in memory: what a rank needs and has not itself is sent by one that has."""

    def __init__(self, snapshot: Snapshot, ranks: RankGroup) -> None:
        self._slot, self._ranks = snapshot.slot, ranks
        items = {item.index: item for _, part in snapshot.found for item, _ in [*part.tensors, *part.pickled]}
        self.index = Index.of(create_default_global_save_plan([SavePlan(list(items.values()))])[1])
        # Of what several nodes have, that of the first rank, as in a checkpoint.
        self._pickled = {item.index.fqn: data for _, part in reversed(snapshot.found) for item, data in part.pickled}
        self._places: dict[MetadataIndex, dict[int, Extent]] = {}
        """Where each tensor, or chunk of one, lies: the place in the slot of every rank that has it."""
        for rank, part in snapshot.found:
            for item, extent in part.tensors:
                self._places.setdefault(item.index, {})[rank] = extent
        self._chunks = list(self._places.values())
        self._numbers = _Numbers([index.fqn for index in self._places], lambda: self._places)

    def read(self, targets: Targets) -> None:
        here = self._ranks.rank
        pickled = [key for key in targets.whole if key in self._pickled]
        targets.found |= {key: self._pickled[key] for key in pickled}
        takers = self._numbers.takers(targets, without=set(pickled))
        own, missing = [], {}
        for number, taker in takers.items():
            some = next(iter(self._chunks[number].values()))
            extent = self._chunks[number].get(here) if some.length else some  # of an empty one there is nothing to read
            if extent is None:
                missing[number] = taker
            else:
                own.append((taker, extent))
        own.sort(key=lambda pair: pair[1].offset)
        with self._open() as file:
            self._ranks.all_or_none(lambda: _read_own(self._file_of, own, targets))
            wanted = _wanted(self._ranks, len(self._chunks), list(missing))
            _send(
                self._ranks,
                [(number, tuple(self._chunks[number]), ranks) for number, ranks in wanted.items()],
                lambda number: next(iter(self._chunks[number].values())),
                lambda number, start, data: read_exactly(file, self._chunks[number][here].offset + start, data),
                missing,
                targets,
            )

    def _file_of(self, opened: ExitStack) -> FileOf:
        file = self._open()
        opened.enter_context(file)
        return lambda _: file

    def _open(self) -> io.RawIOBase | io.BytesIO:
        """This rank's slot; opened again, for the position in an inherited file is the parent's too."""
        return io.BytesIO() if self._slot is None else Path(f"/proc/self/fd/{self._slot.file}").open("rb", buffering=0)


class _Numbers:
    """The saved objects by number: of a key that has one, and of each chunk of a tensor."""

    def __init__(self, keys: Sequence[str], chunks: Callable[[], Iterable[MetadataIndex]]) -> None:
        """`keys` are those of all objects; the first of these are the `chunks`."""
        self._chunks = chunks
        self._of_key = dict(zip(keys, range(len(keys)), strict=True))

    @cached_property
    def _of_chunk(self) -> dict[MetadataIndex, int]:
        return {index: number for number, index in enumerate(self._chunks())}

    def takers(self, targets: Targets, without: Collection[str] = ()) -> dict[int, Taker]:
        """What takes each object of which this rank wants something, but for some keys."""
        takers: dict[int, Taker] = {self._of_key[key]: key for key in targets.whole if key not in without}
        for item in targets.items:
            some = takers.setdefault(self._of_chunk[item.storage_index], [])
            assert isinstance(some, list)  # a key has its tensor whole, or parts of it
            some.append(item)
        return takers


def _read_own(open_files: Callable[[ExitStack], FileOf], own: Sequence[tuple[Taker, Extent]], targets: Targets) -> None:
    """What this rank reads for itself alone, in the order of the files.

    What comes into new memory is read in several threads where there is much of it: most of the time the system gives
    out that memory, page by page, while no thread needs the GIL.
    """

    def read(piece: list[Run]) -> None:
        with ExitStack() as opened:  # again for each piece: an open file has one position
            read_whole(open_files(opened), piece, targets)

    whole: list[Any] = [pair for pair in own if isinstance(pair[0], str)]
    _each(_pieces(runs(whole)), read)
    with ExitStack() as opened:
        file_of = open_files(opened)
        for taker, extent in own:
            if not isinstance(taker, str):
                for item in taker:
                    read_item(file_of(extent), extent, item, targets)


def _pieces(whole: Iterable[Run]) -> list[list[Run]]:
    pieces: list[list[Run]] = [[]]
    nbytes = 0
    for run in whole:
        pieces[-1].append(run)
        nbytes += run[-1][1].offset + run[-1][1].length - run[0][1].offset
        if nbytes >= _PIECE:
            pieces.append([])
            nbytes = 0
    return [piece for piece in pieces if piece]


def _each(pieces: Sequence[list[Run]], read: Callable[[list[Run]], None]) -> None:
    """Read the pieces, in several threads if there are several and the CPUs for it."""
    threads, running = min(len(pieces), _THREADS, _cpus()), []
    if threads > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(threads, "checkpoint-read") as pool:
            running = [pool.submit(read, piece) for piece in pieces]  # refused where no thread can be started
    for one in running:
        one.result()
    if not running:
        for piece in pieces:
            read(piece)


def _cpus() -> int:
    """How many this rank may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class _Files:
    """The files of a checkpoint, each opened once."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self._directory, self._opened = directory, opened
        self._files: dict[str, io.RawIOBase] = {}

    def of(self, extent: Extent) -> io.RawIOBase:
        if extent.file not in self._files:
            file = (self._directory / extent.file).open("rb", buffering=0)
            self._files[extent.file] = self._opened.enter_context(file)
        return self._files[extent.file]

    def read(self, extent: Extent, start: int, data: memoryview) -> None:
        read_exactly(self.of(extent), extent.offset + start, data)


def _wanted(ranks: RankGroup, count: int, numbers: Iterable[int]) -> dict[int, Ranks]:
    """Which ranks want which of `count` chunks, where any does; this one wants `numbers`. Collective."""
    if ranks.world_size == 1:
        return dict.fromkeys(numbers, (0,))
    mine = np.zeros(count, np.uint8)
    mine[list(numbers)] = 1
    packed = ranks.gather(np.packbits(mine).tobytes())
    table = np.stack([np.unpackbits(np.frombuffer(bits, np.uint8), count=count) for bits in packed], axis=1)
    known: dict[bytes, Ranks] = {}  # few are different
    found = {}
    for number in np.flatnonzero(table.any(axis=1)).tolist():
        row = table[number]
        key = row.tobytes()
        if key not in known:
            known[key] = tuple(np.flatnonzero(row).tolist())
        found[number] = known[key]
    return found


def _send(
    ranks: RankGroup,
    chunks: Iterable[tuple[int, Ranks, Ranks]],
    extent: Callable[[int], Extent],
    read: Callable[[int, int, memoryview], None],
    takers: Mapping[int, Taker],
    targets: Targets,
) -> None:
    """Send chunks, each as (number, ranks that can read it, ranks that want it), to what takes them there."""
    order = sorted(chunks, key=lambda chunk: (chunk[1], chunk[2], chunk[0]))
    sinks: dict[int, Sink] = {}

    def take(position: int, start: int, data: memoryview) -> None:
        number = order[position][0]
        if number not in sinks:
            sinks[number] = Sink(extent(number), takers[number], targets)
        if sinks[number].take(start, data):
            del sinks[number]

    send_all(
        ranks,
        [Transfer(extent(number).length, holders, receivers) for number, holders, receivers in order],
        lambda position, start, data: read(order[position][0], start, data),
        take,
    )
