"""A pass over a DataLoader of the script's own, as a function of one number: exact in another attempt.

    base (drawn from torch's generator when the pass begins)
      --seeds--> the sampler's draws | each sample's draws, by (base, batch, place) | collate's, by (base, batch)

A checkpoint holds (base, batches taken); batches that are done are skipped without loading. All of it happens on a copy
of the loader. worker/epochs.py calls this. A dataset with a generator of its own draws what it draws: it is a limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from jobkit.train.seeds import (
    derive_seed,
    generator_state,
    load_generator_state,
    preserved_generators,
    seed_cpu_generators,
)


def draw_base() -> int:
    """Return the number of a new pass, from torch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class Pass:
    """One pass over a loader, or over any iterable of batches, from batch number `first` on.

    for batch in Pass(loader, base=draw_base()): ...
    """

    def __init__(self, loader: Any, base: int, first: int = 0, sampler_state: Any = None) -> None:
        self.base, self.first = base, first
        self._loader = loader
        self._ids: dict[int, list[int]] = {}
        sampler = _sampler_of(loader)
        if sampler_state is not None:
            sampler.load_state_dict(sampler_state)
        self.sampler_state = sampler.state_dict() if callable(getattr(sampler, "state_dict", None)) else None
        """The state of a sampler that has one, as it was when the pass began."""

    def ids(self, number: int) -> list[int]:
        """Return the ids of a batch's samples, where the sampler gives numbers; ids of earlier batches are gone."""
        for old in [other for other in self._ids if other < number]:
            del self._ids[old]
        return self._ids.get(number, [])

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return self._read_again(loader)
        for owner in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(derive_seed(self.base, "generator"))
        clone = copy.copy(loader)
        changes = {
            "generator": torch.Generator().manual_seed(derive_seed(self.base, "workers")),
            "persistent_workers": False,  # workers of the pass before would hold that pass's seeds
            "_iterator": None,
        }
        is_stream = isinstance(loader.dataset, IterableDataset)
        vars(clone).update(changes if is_stream else changes | self._by_place(loader))  # DataLoader's own are read-only
        return self._read_again(clone) if is_stream else iter(clone)

    def _by_place(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the parts of a loader whose sampler, dataset and collate draw by place."""
        by_batch = loader.batch_sampler is not None
        places = _Places(loader.batch_sampler if by_batch else loader.sampler, self.base, self.first, self._ids)
        return {
            "dataset": _SeededDataset(loader.dataset, self.base),
            "batch_sampler" if by_batch else "sampler": places,
            "collate_fn": _SeededCollate(loader.collate_fn, self.base),
        }

    def _read_again(self, loader: Any) -> Iterator[Any]:
        """Yield batches of a stream, or of any iterable, under the pass's own generators; done ones are read again."""
        generators = _OwnGenerators(derive_seed(self.base, "stream"))
        with generators.inside():
            iterator = iter(loader)
        number = 0
        while True:
            with generators.inside():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if number >= self.first:
                yield batch
            number += 1


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


class _Places:
    """A sampler's items with their places: [(batch, place, index), ...] for a batch, (batch, 0, index) for a sample.

    Samplers draw at the first `next`, not when the iterator is made: each `next` runs under the pass's own generators.
    """

    def __init__(self, sampler: Any, base: int, first: int, ids: dict[int, list[int]]) -> None:
        self._sampler, self._base, self._first, self._ids = sampler, base, first, ids

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        generators = _OwnGenerators(derive_seed(self._base, "sampler"))
        with generators.inside():
            iterator = iter(self._sampler)
        number = 0
        while True:
            with generators.inside():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            if number >= self._first:
                several = isinstance(item, (list, tuple))
                indices = list(item) if several else [item]
                self._ids[number] = [index for index in indices if isinstance(index, int)]
                places = [(number, place, index) for place, index in enumerate(indices)]
                yield places if several else places[0]
            number += 1


class _SeededDataset(Dataset[Any]):
    """A dataset whose samples draw by their place in the pass."""

    def __init__(self, dataset: Any, base: int) -> None:
        self.dataset, self.base = dataset, base

    def __getattr__(self, name: str) -> Any:  # of the user's dataset, for worker_init_fn
        if name in ("dataset", "__getstate__", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: tuple[int, int, Any]) -> tuple[int, Any]:
        number, place, index = key
        with _restoring():
            seed_cpu_generators(derive_seed(self.base, number, place))
            return number, self.dataset[index]

    def __getitems__(self, keys: list[tuple[int, int, Any]]) -> tuple[int, Any]:
        number = keys[0][0] if keys else 0
        with _restoring():
            load = getattr(self.dataset, "__getitems__", None)
            if callable(load):
                seed_cpu_generators(derive_seed(self.base, number, 0))
                return number, load([index for _, _, index in keys])
            samples = []
            for _, place, index in keys:
                seed_cpu_generators(derive_seed(self.base, number, place))
                samples.append(self.dataset[index])
        return number, samples


class _SeededCollate:
    """A collate function that draws by the number of its batch."""

    def __init__(self, collate: Callable[[Any], Any], base: int) -> None:
        self._collate, self._base = collate, base

    def __call__(self, item: tuple[int, Any]) -> Any:
        number, samples = item
        with _restoring():
            seed_cpu_generators(derive_seed(self._base, number, "collate"))
            return self._collate(samples)


@contextmanager
def _restoring() -> Iterator[None]:
    """Put the generators back in the training's process; a worker's generators are nobody else's."""
    if get_worker_info() is not None:
        yield
    else:
        with preserved_generators():
            yield
