"""A pass over a DataLoader of the script's own, as a function of one number: exact in another attempt.

    base (drawn from torch's generator when the pass begins)
      --seeds--> the sampler's draws | the draws of a batch's samples and of its collate, by (base, batch)

A checkpoint holds (base, batches taken); batches that are done are skipped without loading, and a digest of their
order shows whether the sampler draws it again. A stream is read again, or goes on from its own state. All of it happens
on a copy of the loader: one for each pass, or one for all where workers persist. loop/epochs.py and the adapters of
frameworks call this. A dataset with a generator of its own draws what it draws: it is a limit.
"""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import xxhash
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from jobkit.data.batch import as_it_is
from jobkit.data.seeds import (
    derive_seed,
    generator_state,
    load_generator_state,
    preserved_but_in_worker,
    preserved_generators,
    seed_cpu_generators,
)
from jobkit.data.trial import copied, digest, has_state, is_exact
from jobkit.data.workers import WorkerInit, fork_workers, outside_is_said
from jobkit.errors import UsageError
from jobkit.log import log

PLAIN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that do not look at what the loop does meanwhile, so that their items may be read ahead."""

AHEAD = 32
"""Batches whose order is read at a time from them."""


def draw_base() -> int:
    """Return the number of a new pass, from torch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


Batch = tuple[int, int]
"""The seed of a pass's draws, and the number of a batch in it."""


class Form(NamedTuple):
    """Sizes that the code may change between two attempts; None if unknown."""

    batch_size: int | None
    length: int | None
    """Samples of the dataset."""


def form_of(loader: Any) -> Form:
    """Return the batch size of a loader, and its dataset's length."""
    if not isinstance(loader, DataLoader):
        return Form(getattr(loader, "batch_size", None), None)
    dataset: Any = loader.dataset
    is_sized = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    # batch_size is None as well where the script gave a batch sampler of its own.
    return Form(1 if loader.batch_sampler is None else loader.batch_size, len(dataset) if is_sized else None)


def length_of(loader: Any) -> int | None:
    """Return a loader's number of batches; None where its sampler has no length, or for the guess of a stream."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader's order may come from: a pass seeds them."""
    if not isinstance(loader, DataLoader):
        return []
    inner = getattr(loader.batch_sampler, "sampler", None)
    owners = (loader, loader.sampler, loader.batch_sampler, inner)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


class Pass:
    """One pass over a loader, or over any iterable of batches; with the state of another pass, from where that was.

    for batch in Pass(loader, draw_base()): ...
    """

    def __init__(self, loader: Any, base: int, state: Mapping[str, Any] | None = None) -> None:
        self.base = base
        self.skipped: int = 0 if state is None else state["skipped"]
        """Samples that are left out: they were done with another batch size, or on another number of ranks."""
        self.taken: int = 0 if state is None else state["taken"]
        """Batches that are done, after the samples left out."""
        self._loader, self._first = loader, self.taken
        self._ids: dict[int, list[int]] = {}
        self._orders: dict[int, str] = {}
        """Of each number of batches near `taken`: the digest of the order up to there."""
        self._order_before: str | None = None if state is None else state.get("order")
        """In an attempt that goes on: that digest, as the attempt before had it."""
        self._sampler, self._is_resumed = _sampler_of(loader), state is not None
        self._sampler_state = None if state is None else state["sampler"]
        if state is None and callable(getattr(self._sampler, "state_dict", None)):
            self._sampler_state = copy.deepcopy(self._sampler.state_dict())
        self._stream_state: Any = None if state is None else state["stream"]
        self._following: str | None = None if state is None else state.get("following")
        """In an attempt that goes on: the digest of the batches after this state, up to the one that comes next."""
        self._back: int = 0 if state is None else state.get("back", 0)
        """How many batches before that one the stream had this state."""
        self._stays = False
        """True if the stream would begin each pass with the state that it was given, as Hugging Face's of one epoch."""
        self._newest: deque[tuple[Any, Any]] = deque()
        """The batches that were read last, of each worker one, each after the stream's state before it."""
        self._draws = derive_seed(base, "after", self.skipped) if self.skipped else base

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """Return how far the pass is, the sampler's state as it was when the pass began, and the stream's state.

        The batch after this place has been read already: the stream's state is the state before that. The newest
        `ahead` batches, 0 or 1, count as not taken.
        """
        taken = self.taken - ahead
        stream, following, back = self._stream_state, self._following, self._back
        if self._newest:  # a trial of one batch would try the state of one worker
            stream, back = self._newest[0][0], len(self._newest) - 1
            following = None if stream is None else digest([batch for _, batch in self._newest])
        return {
            "taken": taken,
            "order": self._orders.get(taken, self._order_before if taken == self._first else None),
            "skipped": self.skipped,
            "sampler": self._sampler_state,
            "stream": stream,
            "following": following,
            "back": back,
        }

    def ids(self, number: int) -> list[int]:
        """Return the ids of a batch's samples, where the sampler gives numbers; ids of earlier batches are gone."""
        for old in [other for other in self._ids if other < number]:
            del self._ids[old]
        return self._ids.get(number, [])

    def batches_left(self) -> int | None:
        """Return how many batches are to come; None where nothing tells."""
        length = length_of(self._loader)
        if length is None or not self.skipped:
            return length if length is None else length - self.taken
        samples = len(self._sampler) - self.skipped
        size = self._loader.batch_size or 1
        return (samples // size if self._loader.drop_last else -(-samples // size)) - self.taken

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self._is_resumed and self._sampler_state is not None:
            self._sampler.load_state_dict(copy.deepcopy(self._sampler_state))
        if not isinstance(loader, DataLoader):
            return self._read(loader)
        for generator in generators_of(loader):
            generator.manual_seed(derive_seed(self.base, "generator"))
        if isinstance(loader.dataset, IterableDataset):  # its workers draw by the pass, so each pass has new ones
            return self._read(_clone(loader, {}, derive_seed(self.base, "workers"), persist=False))
        persists = loader.persistent_workers and type(loader).__iter__ is DataLoader.__iter__
        return self._ordered(loader, self._over_kept(loader) if persists else iter(self._by_place(loader)))

    def _ordered(self, loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, in the order of the attempt before: say where it is another.

        Raises UsageError for batches that the loader's sampler has not ordered.
        """
        end = object()
        batch = next(batches, end)
        if batch is not end and not self._orders:
            raise _own_iterator(loader)
        if self._order_before is not None and self._orders.get(self._first) != self._order_before:
            is_of_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
            log.warning(
                "%s has another order in this pass than in the attempt before: samples are repeated and left out. Give "
                "it state_dict and load_state_dict and track it, or let its order follow from set_epoch, from its "
                "`generator`, or from torch's default generator",
                type(loader.batch_sampler if is_of_batches else loader.sampler).__name__,
            )
        while batch is not end:
            yield batch
            self._orders.pop(self.taken - 2, None)
            batch = next(batches, end)

    def _over_kept(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches that the workers of the pass before load; what they draw comes with each batch."""
        kept = _KEPT.pop(loader, None)  # a second pass at the same time has workers of its own
        if kept is None:
            kept = self._by_place(loader, persist=True)
        else:
            sampler: Any = kept.batch_sampler if kept.batch_sampler is not None else kept.sampler
            sampler.places = self._seeded_sampler(loader)
        try:
            yield from kept
        finally:
            _KEPT[loader] = kept

    def _by_place(self, loader: DataLoader[Any], *, persist: bool = False) -> DataLoader[Any]:
        """Return a copy of a loader whose sampler, dataset and collate draw by place."""
        changes = {
            "dataset": SeededDataset(loader.dataset, loader.collate_fn),
            "batch_sampler" if loader.batch_sampler is not None else "sampler": _OfPass(self._seeded_sampler(loader)),
            "collate_fn": as_it_is,
        }
        # A worker that persists may draw as it starts: alike in the first pass of each attempt.
        return _clone(loader, changes, derive_seed(torch.initial_seed() if persist else self.base, "workers"), persist)

    def _seeded_sampler(self, loader: DataLoader[Any]) -> SeededSampler:
        by_batch = loader.batch_sampler is not None
        sampler: Any = loader.batch_sampler if by_batch else loader.sampler
        if self.skipped:
            rest = _After(loader.sampler, self.skipped)
            sampler = BatchSampler(rest, loader.batch_size or 1, loader.drop_last) if by_batch else rest
        is_plain = type(loader.sampler) in PLAIN_SAMPLERS and type(loader.batch_sampler) in (BatchSampler, type(None))
        return SeededSampler(
            sampler, self.base, self._draws, self._first, self._ids, AHEAD if is_plain else 1, self._orders
        )

    def _read(self, loader: Any) -> Iterator[Any]:
        """Yield batches of a stream, or of any iterable, whose draws follow from (base, batch).

        Done ones are read again, unless the loader, or a dataset that is read in this process, has a state.
        """
        dataset = getattr(loader, "dataset", None)
        owners = [loader, dataset] if getattr(loader, "num_workers", 0) == 0 else [loader]
        if isinstance(loader, DataLoader) and not has_state(dataset):
            owners = []  # torchdata's loader would read it again itself, and from its second restart on wrongly
        owner: Any = next(filter(has_state, owners), None)
        number = 0
        if owner is not None and self._stream_state is not None and self._is_exact(loader, owner is loader):
            if self._stays:  # the script's own begins its later passes anew
                loader, owner = self._over(loader, copied(_stream_of(loader)), owner is loader)
            owner.load_state_dict(copy.deepcopy(self._stream_state))
            number = self._first - self._back
        self._newest = deque(maxlen=max(1, getattr(loader, "num_workers", 0)))
        kept = _iterators_in(loader)
        with _drawing(self.base, "stream"):
            iterator = iter(loader)
        while True:
            is_near = number + (self._newest.maxlen or 1) > self._first
            state = copy.deepcopy(owner.state_dict()) if owner is not None and is_near else None
            with _drawing(self.base, "stream", number):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if number == 0 and (kept := kept & _iterators_in(loader)):
                if kept & set(_OF_PASSES):
                    raise _own_iterator(loader)
                _OF_PASSES.update(kept)
            if owner is not None and is_near:
                self._newest.append((state, tree_leaves(batch)))  # the script may pop a part of it
            if number >= self._first:
                yield batch
            number += 1

    def _is_exact(self, loader: Any, is_loaders: bool) -> bool:
        """Return whether the state, of the loader or of its dataset, brings the next batch back, in a copy."""
        stream = _stream_of(loader)
        if self._following is None or not isinstance(stream, IterableDataset):
            return True

        def following(other: Any) -> Any:
            clone, owner = self._over(loader, other, is_loaders)
            owner.load_state_dict(copy.deepcopy(self._stream_state))
            batches = self._next_of(clone, 1 + self._back)
            if getattr(loader, "num_workers", 0) == 0:  # the workers' streams are copies already
                with suppress(Exception):  # the stream may be at its end, or allow one pass alone
                    self._stays = digest(self._next_of(clone, 1)) == self._following
            return batches

        return is_exact(stream, following, self._following)

    def _over(self, loader: Any, stream: Any, is_loaders: bool) -> tuple[Any, Any]:
        """Return the loader over another stream, and what has the state: the loader or the stream."""
        if not isinstance(loader, DataLoader):
            return stream, stream
        clone = copy.copy(loader)
        generator = torch.Generator().manual_seed(derive_seed(self.base, "workers"))
        vars(clone).update(dataset=stream, generator=generator)
        return clone, clone if is_loaders else stream

    def _next_of(self, loader: Any, count: int) -> list[Any]:
        """Return the first batches of a new iterator, up to the one with which this pass goes on, drawn alike."""
        with _drawing(self.base, "stream"):
            iterator = iter(loader)
        batches = []
        for number in range(self._first + 1 - count, self._first + 1):
            with _drawing(self.base, "stream", number):
                batches.append(next(iterator))
        return batches


_KEPT: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()
"""Of each loader whose workers persist, the copy of it that has them, while no pass is under way."""


_OF_PASSES: WeakSet[_BaseDataLoaderIter] = WeakSet()
"""Iterators of torch that loaders of the script kept while a pass over them was under way."""


def _iterators_in(loader: Any) -> set[_BaseDataLoaderIter]:
    """Return the iterators of torch that a loader of the script keeps."""
    attributes = {name: value for name, value in getattr(loader, "__dict__", {}).items() if name != "_iterator"}
    return {value for value in attributes.values() if isinstance(value, _BaseDataLoaderIter)}


def _own_iterator(loader: Any) -> UsageError:
    return UsageError(
        f"{type(loader).__name__} takes its batches from an iterator of its own, whose place cannot be "
        "restored: give a DataLoader with persistent_workers=True, whose workers are kept as well"
    )


def _clone(loader: DataLoader[Any], changes: Mapping[str, Any], seed: int, persist: bool) -> DataLoader[Any]:
    """Return a copy of a loader with other parts, whose workers are seeded so."""
    clone = copy.copy(loader)
    parts: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(seed),
        "worker_init_fn": WorkerInit(loader.worker_init_fn),
        "persistent_workers": persist,
        "_iterator": None,
    }
    # Of torchdata's loader: a state that the script has loaded, or asked for, is not this pass's.
    kept = {"next_iter_state": None, "_initial_iter_for_state_dict": False}
    parts |= {name: value for name, value in kept.items() if name in vars(loader)}
    vars(clone).update({**parts, **changes})  # DataLoader's own are read-only
    return fork_workers(clone)


class _OfPass:
    """The sampler of a loader: that of the pass under way."""

    def __init__(self, places: SeededSampler) -> None:
        self.places = places

    def __getattr__(self, name: str) -> Any:  # of the script's sampler, for a loader of the script's own class
        if name in ("places", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.places.sampler, name)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.places)


def _stream_of(loader: Any) -> Any:
    return loader.dataset if isinstance(loader, DataLoader) else loader


@contextmanager
def _drawing(*place: object) -> Iterator[None]:
    """Within it, the generators draw by a place."""
    with preserved_generators():
        seed_cpu_generators(derive_seed(*place))
        yield


class _After:
    """A sampler without its first samples."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._skipped, None)


def _sampler_of(loader: Any) -> Any:
    """Return the innermost sampler of a loader; None for other iterables."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batch_sampler = loader.batch_sampler
    if callable(getattr(batch_sampler, "state_dict", None)):
        return batch_sampler
    return getattr(batch_sampler, "sampler", loader.sampler)


class _OwnGenerators:
    """States of all CPU generators that are in force within `inside` alone."""

    def __init__(self, seed: int) -> None:
        with preserved_generators():
            seed_cpu_generators(seed)
            self._state = generator_state()

    @contextmanager
    def inside(self) -> Iterator[None]:
        outside = generator_state()
        load_generator_state(self._state)
        try:
            yield
        finally:
            self._state = generator_state()
            load_generator_state(outside)


class SeededSampler:
    """A sampler's items with their seeds: [((draws, batch), index), ...] for a batch, one of these for a sample.

    `base` decides what the sampler draws, `draws` what is drawn for the batches, which go on from the one with the
    number `first`. Samplers draw at the first `next`, not when the iterator is made: each `next` runs under the pass's
    own generators. To exchange these takes 0.1 ms, for `ahead` items at once. `orders` gets the digest of the indices
    so far after each batch.
    """

    def __init__(
        self,
        sampler: Any,
        base: int,
        draws: int,
        first: int,
        ids: dict[int, list[int]],
        ahead: int = 1,
        orders: dict[int, str] | None = None,
    ) -> None:
        self._sampler, self.base, self.draws, self.ids = sampler, base, draws, ids
        self._first, self._ahead, self._orders = first, ahead, orders

    @property
    def sampler(self) -> Any:
        return self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        draws, generators = self.draws, _OwnGenerators(derive_seed(self.base, "sampler"))
        with generators.inside():
            iterator = iter(self._sampler)
        numbers, order = count(), xxhash.xxh3_64()
        while True:
            with generators.inside():
                items = list(islice(iterator, self._ahead))
            if not items:
                return
            for item, number in zip(items, numbers, strict=False):
                several = isinstance(item, (list, tuple))
                indices = list(item) if several else [item]
                if self._orders is not None:
                    order.update(_bytes_of(indices))
                    if number + 1 >= self._first:
                        self._orders[number + 1] = order.hexdigest()
                if number < self._first:
                    continue
                self.ids[number] = [index for index in indices if isinstance(index, int)]
                places = [((draws, number), index) for index in indices]
                yield places if several else places[0]


def _bytes_of(indices: list[Any]) -> bytes:
    """Return bytes that tell indices apart, if they are numbers, texts, arrays, or made of these."""
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError, ValueError):
        return digest(indices, whole=False).encode()


class SeededDataset(Dataset[Any]):
    """A dataset of collated batches, whose draws and collate's follow from the number of the batch: one seed for all.

    To seed for each sample would take longer than many a sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset, self._collate = dataset, collate

    def __getattr__(self, name: str) -> Any:  # of the user's dataset, for worker_init_fn
        if name in ("dataset", "_collate", "__getstate__", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[Batch, Any]) -> Any:
        batch, index = key
        with outside_is_said(), preserved_but_in_worker():
            seed_cpu_generators(derive_seed(*batch))
            return self._collate(self.dataset[index])

    def __getitems__(self, keys: list[tuple[Batch, Any]]) -> Any:
        with outside_is_said(), preserved_but_in_worker():
            if keys:
                seed_cpu_generators(derive_seed(*keys[0][0]))
            indices, load = [index for _, index in keys], getattr(self.dataset, "__getitems__", None)
            return self._collate(load(indices) if callable(load) else [self.dataset[index] for index in indices])
