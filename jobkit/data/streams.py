"""Streams of ctx.loader: datasets that can only be read from their beginning on, as an IterableDataset.

    stream --shard(parts, i)--> part i, an endless stream --sample p of all comes from part p % parts--> global batches

The parts follow from the stream and the global batch, not from the ranks: the samples of a global batch are the same on
any number of ranks and workers. Ranks divide the parts between them; where the ranks do not divide their number, or the
stream has no `shard`, every rank reads all of it and keeps its share of each batch.

A restart reads the stream again up to its position; a stream with state_dict and load_state_dict goes on from its
state before the last sample of a batch, where a trial brings that sample back (trial.py). Every worker reads, and
collates the batches that are its turn: decode in `collate_fn`, not in the stream. Random numbers follow from (seed,
part, sample). loader.py calls this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as workers_module

from jobkit.data.order import sample_range
from jobkit.data.seeds import derive_seed, seed_cpu_generators
from jobkit.data.trial import digest, has_state, is_exact
from jobkit.data.workers import outside_is_said
from jobkit.errors import UsageError

MOST_PARTS = 64
"""Parts of a stream that are open at once."""

Say = Callable[[str, Any, Any, str], None]


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be read from its beginning. Raises UsageError for any other object."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(f"ctx.loader takes a dataset, not a {kind}: give it the {kind}'s dataset, or ctx.batches it")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
            raise UsageError(
                f"ctx.loader: a {kind} is no dataset: expected one with __getitem__ and __len__, or a stream whose "
                "__iter__ begins anew each time, as an IterableDataset"
            )
        return True
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"the {kind} of ctx.loader has no length: give it __len__, or make it an IterableDataset")
    return False


class Stream:
    """How a stream is divided, and how far it has been read.

    stream = Stream(dataset, global_batch_size=256, rank=0, world_size=4, seed=0)
    for item in DataLoader(stream.reader(done=0), batch_size=None):
        batch = stream.take(item)      # 64 samples, collated

    `gather` gives the values of all ranks, to compare what they read.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate
        self.global_batch_size, self.world_size, self.seed = global_batch_size, world_size, derive_seed(seed, "stream")
        self.parts = _parts_of(dataset, global_batch_size)
        is_divided = self.parts % world_size == 0
        """True if each rank reads parts of its own."""
        self.numbers = (
            range(self.parts)[sample_range(self.parts, rank, world_size)] if is_divided else range(self.parts)
        )
        """The parts that this rank reads."""
        places = range(global_batch_size)
        self.kept = places if is_divided else places[sample_range(global_batch_size, rank, world_size)]
        """Of the samples of a batch that this rank reads, those that are its share, by their place in the batch."""
        self._gather = None if is_divided else gather
        self.states: dict[int, Any] = {}
        """Of each part that this rank reads, its state before its last sample of the batch that was handed out last."""
        self.epoch = 0.0
        """Whole passes over the part that has come least far."""

    def part(self, number: int) -> Any:
        return self.dataset if self.parts == 1 else self.dataset.shard(num_shards=self.parts, index=number)

    def reader(self, done: int) -> IterableDataset[Any]:
        """Return an endless dataset of items for `take`, after `done` samples."""
        return _Reader(self, done)

    def take(self, item: tuple[Any, dict[int, Any], int, str]) -> Any:
        """Return the batch of an item. Raises UsageError, at the first, where ranks read different streams."""
        batch, self.states, epoch, first = item
        self.epoch = float(epoch)
        if self._gather is not None:
            firsts, self._gather = self._gather(first), None
            if len(set(firsts)) > 1:
                raise UsageError(
                    "ctx.loader: each rank reads all of this stream and keeps its share, and the ranks read different "
                    "samples: let it give all of them to each; a stream that divides itself is for ctx.batches"
                )
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("parts", "world_size", "epoch", "states")}

    def load_state_dict(self, state: Mapping[str, Any], done: int, say: Say) -> None:
        self.epoch, states = state["epoch"], state["states"]
        if state["parts"] != self.parts:
            say("number of parts", state["parts"], self.parts, f"it is read to sample {done} in another order")
            states = {}
        elif states and not all(number in states for number in self.numbers):
            say("number of ranks", state["world_size"], self.world_size, f"the stream is read again to sample {done}")
            states = {}
        self.states = copy.deepcopy(states)


def _parts_of(dataset: Any, global_batch_size: int) -> int:
    """Return into how many parts a stream is divided: all have as many samples in each global batch."""
    shards = getattr(dataset, "num_shards", 1) if callable(getattr(dataset, "shard", None)) else 1
    max_parts = min(MOST_PARTS, shards)
    return max(parts for parts in range(1, max_parts + 1) if shards % parts == 0 and global_batch_size % parts == 0)


class _Reader(IterableDataset[Any]):
    """A worker's dataset: (batch, states, epoch, digest of the first sample) of the batches that are its turn."""

    def __init__(self, stream: Stream, done: int) -> None:
        self._stream, self._done, self._states = stream, done, stream.states

    def __iter__(self) -> Iterator[tuple[Any, dict[int, Any], int, str]]:
        info, stream = get_worker_info(), self._stream
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        workers_module._worker_info = None  # a stream that divides itself over the workers would give a part of it
        done, count, turn = self._done, stream.parts, 0
        read = {number: (done - number + count - 1) // count for number in stream.numbers}
        states: dict[int, Any] = self._states
        if states and not self._is_exact(stream.numbers[0], read[stream.numbers[0]]):
            states = {}
        parts = {number: _Part(stream, number, read[number], states.get(number)) for number in stream.numbers}
        kept = set(stream.kept)
        while True:
            is_mine = turn % workers == worker
            samples, first, states = [], "", {}
            for place in range(stream.global_batch_size):
                part = parts.get((done + place) % count)
                if part is None:
                    continue
                number = (done + place) % count
                is_last = is_mine and place + count >= stream.global_batch_size
                state = part.state() if is_last else None
                with outside_is_said():
                    sample = next(part)
                if state is not None:
                    states[number] = {**state, "last": digest(sample) if number == stream.numbers[0] else None}
                if is_mine and place in kept:
                    samples.append(sample)
                if turn < workers and not first:
                    first = digest(sample, whole=False)
            done, turn = done + stream.global_batch_size, turn + 1
            if is_mine:
                seed_cpu_generators(derive_seed(stream.seed, "collate", done))
                yield stream.collate_fn(samples), states, min(part.epoch for part in parts.values()), first

    def _is_exact(self, number: int, read: int) -> bool:
        """Return whether the state of a part brings its last sample back, in a copy; the parts are alike."""
        stream, state = self._stream, self._states[number]
        if state.get("last") is None:  # of another rank's second part, or of an older checkpoint
            return "last" not in state
        part = stream.part(number)
        return is_exact(part, lambda other: _Part(stream, number, read, state, other).last, state["last"])


class _Part:
    """A part of a stream, again and again, after `read` samples."""

    def __init__(
        self, stream: Stream, number: int, read: int, state: Mapping[str, Any] | None, part: Any = None
    ) -> None:
        self._part, self._seed = stream.part(number) if part is None else part, derive_seed(stream.seed, "part", number)
        self._has_state = has_state(self._part)
        self.epoch, self._read, self._read_in_epoch = 0, 0, 0
        self.last: Any = None
        """The sample that was read last."""
        if self._has_state and state is not None:
            is_before = "last" in state  # the last sample; older checkpoints have the state after it
            self.epoch, self._read, self._read_in_epoch = state["epoch"], read - is_before, state["read_in_epoch"]
            self._open(state["stream"])
        else:
            self._open(None)
        while self._read < read:
            self.last = next(self)

    def _open(self, state: Any) -> None:
        seed_cpu_generators(derive_seed(self._seed, "epoch", self.epoch))
        if callable(set_epoch := getattr(self._part, "set_epoch", None)):
            set_epoch(self.epoch)
        if state is not None:
            self._part.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._part)

    def __next__(self) -> Any:
        while True:
            seed_cpu_generators(derive_seed(self._seed, self._read))
            try:
                sample = next(self._iterator)
            except StopIteration:
                if self._read_in_epoch == 0:
                    raise UsageError("ctx.loader: the stream, or a shard of it, gives no sample") from None
                self.epoch, self._read_in_epoch = self.epoch + 1, 0
                self._open(None)
                continue
            self._read, self._read_in_epoch = self._read + 1, self._read_in_epoch + 1
            return sample

    def state(self) -> dict[str, Any] | None:
        if not self._has_state:
            return None
        stream = copy.deepcopy(self._part.state_dict())
        return {"epoch": self.epoch, "read_in_epoch": self._read_in_epoch, "stream": stream}
