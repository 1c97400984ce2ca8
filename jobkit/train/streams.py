"""Streams, which can only be read from their beginning on: shared out over ranks and workers, and continued exactly."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torchs_worker

from jobkit.checkpoint.summary import digest, summarise
from jobkit.errors import UsageError
from jobkit.train.loader_options import Share
from jobkit.train.order import share_of
from jobkit.train.seeds import derive_seed, preserved_generators, seed_cpu_generators

WHOLE = "whole"
"""Each worker of each rank reads all of the stream and keeps its share: the same samples on any number of both."""

SPLIT = "split"
"""The stream has a way to be divided: each worker of each rank reads a part."""

OWN = "sharded by itself"
"""The stream gives each worker of each rank other samples."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from its beginning on. Raises UsageError for what is no dataset."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"ctx.loader makes batches of a dataset, and was given a {kind}: give it that one's dataset, or keep your "
            "own and, where it has a state_dict, call ctx.track(per_rank={'loader': it})"
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__"):
        return False
    if not hasattr(dataset, "__iter__"):
        raise UsageError(f"ctx.loader takes a Dataset or an IterableDataset, and was given a {kind}")
    if hasattr(dataset, "__next__"):
        raise UsageError(
            f"ctx.loader was given a {kind}, which can be read once and not again from its beginning: give it an "
            "object whose __iter__ begins anew, as an IterableDataset"
        )
    return True


@dataclass(frozen=True)
class Place:
    """How far a stream has been read."""

    epoch: int = 0
    offset: int = 0
    """Samples read in this epoch."""
    state: Any = None
    """What the stream itself says of it, where that is used."""


class _Samples:
    """The samples of a stream from a place on, epoch after epoch, until an epoch has none.

    What is drawn while a stream is read is seeded where an epoch begins, so that all who read it shuffle alike, and
    again where a batch of `size` samples begins. So a stream that is read again up to a place goes on as before.
    """

    def __init__(
        self, stream: Any, place: Place, done: int, size: int, seed_epoch: _Seed, seed_batch: _Seed, own_state: bool
    ) -> None:
        self.place = place
        self._stream, self._done, self._size = stream, done, size  # `done` samples have been read, of all epochs
        self._seed_epoch, self._seed_batch = seed_epoch, seed_batch
        self._own_state = own_state
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._epoch()
            if self.place.offset == 0:
                return
            self.place = Place(self.place.epoch + 1)

    def place_now(self) -> Place:
        """The place, with what the stream says of it."""
        state = _holder(self._iterator, self._stream).state_dict() if self._own_state else None
        return Place(self.place.epoch, self.place.offset, copy.deepcopy(state))

    def _epoch(self) -> Iterator[Any]:
        """What is left of the epoch; samples that have been read before are read once more, without a state."""
        epoch, first = self.place.epoch, self._done - self.place.offset
        self._open()
        at = first if self.place.state is None else self._done
        if at > first:
            self._seed_batch(at // self._size)
        for sample in self._iterator:
            if at == first:
                self._seed_batch(at // self._size, "begins")
            at += 1
            if at > self._done:
                self._done, self.place = at, Place(epoch, at - first)
                yield sample
            if at % self._size == 0:  # only now: a collate_fn may have drawn numbers since the sample was handed out
                self._seed_batch(at // self._size)

    def _open(self) -> None:
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            self._seed_epoch(self.place.epoch)  # it may draw the order
            set_epoch(self.place.epoch)
        self._seed_epoch(self.place.epoch)
        state = self.place.state
        if state is not None and _holder(self._stream) is not None:
            self._stream.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._stream)
        if state is not None and _holder(self._stream) is None:
            _holder(self._iterator).load_state_dict(copy.deepcopy(state))


_Seed = Callable[..., None]


def _holder(*candidates: Any) -> Any:
    """The first that has a state."""
    has = (one for one in candidates if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
    return next(has, None)


class _Item(NamedTuple):
    """What a worker hands over: a batch, and the place of its stream after it."""

    worker: int
    batch: Any
    place: _Opaque | None
    """None where there is no batch: it is another worker's turn."""
    is_empty: bool = False
    """Whether the stream has no sample."""
    first: str | None = None
    """Of the first batch of a stream that all ranks read whole, a digest of all ranks' samples."""


@dataclass(frozen=True)
class _Opaque:
    """Nothing that DataLoader would pin."""

    place: Place


@dataclass
class _Reader(IterableDataset[_Item]):
    """What a worker runs: endless items, of every batch that is its turn."""

    parts: list[Any]
    """The stream of each worker, or one that each has a copy of."""
    places: list[Place]
    """Where each begins, or all."""
    first: int
    """The number of the global batch to begin with."""
    size: int
    """Samples that a batch takes of a stream."""
    share: slice
    """Those of them that are this rank's."""
    is_whole: bool
    own_state: bool
    seed: tuple[object, ...]
    collate_fn: Callable[[list[Any]], Any]

    def of_worker(self, number: int) -> Any:
        """The user's stream."""
        return self.parts[number % len(self.parts)]

    def __iter__(self) -> Iterator[_Item]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self.is_whole and info is not None:
            torchs_worker._worker_info = None  # a stream that divides itself by it would give a part of the whole
        if worker < self.first % workers:
            yield _Item(worker, None, None)  # DataLoader takes turns from worker 0 on
        # Batches that take samples of this stream: all, or each that is this worker's turn.
        number, step = (self.first, 1) if self.is_whole else (self.first + (worker - self.first) % workers, workers)
        stream = self.of_worker(worker)
        if info is not None and isinstance(epoch := getattr(stream, "_epoch", None), torch.Tensor):
            stream._epoch = epoch.clone()  # Hugging Face's: in memory that workers share, and these are not in step
        samples = _Samples(
            stream,
            self.places[worker % len(self.places)],
            done=number // step * self.size,
            size=self.size,
            seed_epoch=self._seed_epoch,
            seed_batch=lambda count, *more: self._seed_batch(count * step + (0 if step == 1 else worker), *more),
            own_state=self.own_state,
        )
        batch: list[Any] = []
        for sample in samples:
            batch.append(sample)
            if len(batch) == self.size:
                if number % workers == worker:
                    first = digest(summarise(batch)) if self.is_whole and number == self.first else None
                    made = self.collate_fn(batch[self.share])
                    yield _Item(worker, made, _Opaque(samples.place_now()), first=first)
                batch = []
                number += step
        yield _Item(worker, None, None, is_empty=True)

    def _seed_epoch(self, epoch: int) -> None:
        seed_cpu_generators(derive_seed(*self.seed[:1], "epoch", epoch))

    def _seed_batch(self, number: int, *more: object) -> None:
        seed_cpu_generators(derive_seed(*self.seed, "batch", number, *more))


class StreamSource:
    """The batches of a stream for a Loader, which says what `sharded` and `own_state` are: None for what fits."""

    def __init__(
        self,
        stream: Any,
        share: Share,
        *,
        sharded: bool | None = None,
        own_state: bool | None = None,
    ) -> None:
        self._of, self._options, self._seed = share, share.options, share.seed
        self._global_batch_size = share.global_batch_size
        self._rank, self._world_size = share.rank, share.world_size
        self._streams = max(share.options.num_workers, 1)
        if sharded is None and getattr(stream, "_distributed", None) is not None:
            sharded = True  # Hugging Face's, which split_dataset_by_node has divided already
        self.sharing = OWN if sharded else SPLIT if sharded is None and _can_be_split(stream) else WHOLE
        self._parts = self._split(stream) if self.sharing == SPLIT else [stream]
        self._own_state = _has_exact_state(stream) if own_state is None else own_state
        self._first: str | None = None
        """A digest of the first global batch that was read in this attempt, by which ranks are compared."""
        self._places = [Place()] * (1 if self.sharing == WHOLE else self._streams)

    @property
    def state_is_per_rank(self) -> bool:
        """Whether each rank reads a stream of its own."""
        return self.sharing != WHOLE

    def samples(self, number: int) -> list[int]:
        """The numbers, in the endless stream, of this rank's samples in a batch; none where it has one of its own."""
        first = number * self._global_batch_size
        return list(range(first, first + self._global_batch_size))[self._share] if self.sharing == WHOLE else []

    def epochs(self, position: int) -> float:
        """Whole passes over the stream, of the part that has come least far."""
        return float(min(place.epoch for place in self._places))

    @property
    def _share(self) -> slice:
        size = self._global_batch_size
        return share_of(size, self._rank, self._world_size)

    def batches(self, position: int) -> Iterator[Any]:
        """The batches from a position on, which is the one that the state is of."""
        share, whole = self._share, self.sharing == WHOLE
        reader = _Reader(
            self._parts,
            self._places,
            first=position,
            size=self._global_batch_size if whole else share.stop - share.start,
            share=share if whole else slice(None),
            is_whole=whole,
            own_state=self._own_state,
            seed=(self._seed,) if whole else (self._seed, self._rank),
            collate_fn=self._options.collate_fn or default_collate,
        )
        self._places = list(self._places)
        items = self._options.batches(reader, self._of, position)
        while True:
            with nullcontext() if self._options.num_workers else preserved_generators():
                item = next(items)
            if item.is_empty:
                where = f"worker {item.worker} of {self._streams} of " if self._streams > 1 else ""
                raise UsageError(
                    f"the stream gives {where}rank {self._rank} no samples: it needs some for each"
                    + (", or fewer num_workers" if where else "")
                )
            self._first = item.first or self._first
            if item.place is not None:
                self._places[item.worker % len(self._places)] = item.place.place
                yield item.batch

    def state(self) -> dict[str, Any]:
        """How far each worker's stream had been read when the last batch was handed out."""
        places = [asdict(place) for place in self._places]
        return {"sharing": self.sharing, "places": places, "first": self._first}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raises UsageError where the stream was shared out in another way."""
        if state["sharing"] != self.sharing:
            raise UsageError(f"the checkpoint's stream was {state['sharing']}, this one is {self.sharing}")
        places = [Place(**place) for place in state["places"]]
        if len(places) != len(self._places):
            raise UsageError(
                f"the checkpoint's stream was read by {len(places)} worker(s) on each rank, and num_workers asks for "
                f"{len(self._places)}: each goes on with a part of its own, so it must be {len(places)} again"
            )
        if self._own_state != any(place.state is not None for place in places) and any(p.offset for p in places):
            raise UsageError("the checkpoint's stream was continued by own_state=" + str(not self._own_state))
        self._places = places

    def _split(self, stream: Any) -> list[Any]:
        """The stream of each worker of this rank; a single one that divides itself over the workers."""
        if _is_hugging_face(stream):
            split = importlib.import_module("datasets.distributed").split_dataset_by_node
            part = split(stream, rank=self._rank, world_size=self._world_size) if self._world_size > 1 else stream
            if part.num_shards < self._streams:
                raise UsageError(
                    f"the stream has {part.num_shards} shard(s) on rank {self._rank}, too few for num_workers="
                    f"{self._options.num_workers}: give at most {part.num_shards}, or make more shards"
                )
            return [part]
        count = self._world_size * self._streams
        first = self._rank * self._streams
        if count == 1:
            return [stream]
        try:
            return [stream.shard(num_shards=count, index=first + index) for index in range(self._streams)]
        except (ValueError, IndexError) as error:
            raise UsageError(
                f"the stream cannot be divided into {count} parts, one for each worker of each rank: {error}; give "
                "fewer num_workers, or sharded=False to have each read all of it"
            ) from error


def _is_hugging_face(stream: Any) -> bool:
    return any(one.__module__.partition(".")[0] == "datasets" for one in type(stream).__mro__)


def _can_be_split(stream: Any) -> bool:
    if _is_hugging_face(stream):
        return True
    try:
        return {"num_shards", "index"} <= inspect.signature(stream.shard).parameters.keys()
    except (AttributeError, TypeError, ValueError):
        return False


def _has_exact_state(stream: Any) -> bool:
    """Whether the state of a stream says all."""
    return hasattr(stream, "load_state_dict") and not lacks_its_buffer(stream)


def lacks_its_buffer(stream: Any) -> bool:
    """Whether it is a Hugging Face stream with a shuffle buffer, which its state does not hold."""
    return _is_hugging_face(stream) and _has_buffer(getattr(stream, "_ex_iterable", None))


def _has_buffer(examples: Any) -> bool:
    if examples is None or "BufferShuffled" in type(examples).__name__:
        return examples is not None
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(_has_buffer(one) for one in inner)
