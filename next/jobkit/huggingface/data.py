"""The batches of a Trainer as a function of epoch and place, so that another attempt draws the same numbers.

    Trainer's DataLoader --seed_batches--> Places (order, skipped without loading) --(seed, index)--> Loaded (samples)

Trainer itself skips the batches that are done. By default a random augmentation, or the masks of a collator, come from
the training's own generators, and a batch is loaded one step ahead of its step: these draws differ after a restart.
callback.py calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from jobkit.train.seeds import derive_seed, preserved_generators, seed_cpu_generators

CHUNK = 256
"""Batches whose order is read at a time."""


class Places:
    """A batch sampler that gives each batch the seed of its place: [(seed, index), ...]."""

    def __init__(self, sampler: Any, seed: int, rank: int, limit: int | None) -> None:
        self._sampler, self._seed, self._rank, self._limit = sampler, seed, rank, limit
        self._ids: dict[int, list[int]] = {}
        self.epoch = 0

    def __getattr__(self, name: str) -> Any:  # accelerate reads batch_size, drop_last, sampler ...
        if name == "_sampler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler) if self._limit is None else min(self._limit, len(self._sampler))

    def begin_epoch(self, epoch: int) -> None:
        """Choose the pass that the next iteration makes, also in the samplers within."""
        self.epoch = epoch
        inner = self._sampler
        while inner is not None:
            if callable(set_epoch := getattr(inner, "set_epoch", None)):
                set_epoch(epoch)
            inner = getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        self._ids = {}
        epoch = self.epoch
        batches = iter(self._sampler)
        for first in range(0, len(self), CHUNK):
            with preserved_generators():  # samplers draw while they are read: equal numbers on all ranks
                seed_cpu_generators(derive_seed(self._seed, "order", epoch, first))
                chunk = list(islice(batches, min(CHUNK, len(self) - first)))
            for number, batch in enumerate(chunk, start=first):
                self._ids[number] = [index for index in batch if isinstance(index, int)]
                seed = derive_seed(self._seed, "batch", epoch, self._rank, number)
                yield [(seed, index) for index in batch]

    def steps_of(self, batches_a_step: int) -> int:
        """Return the number of steps of an epoch."""
        return max(1, -(-len(self) // batches_a_step))

    def ids(self, step: int, batches_a_step: int) -> list[int]:
        """Return the ids of a step's samples; `step` counts all epochs."""
        first = step % self.steps_of(batches_a_step) * batches_a_step
        return [item for number in range(first, first + batches_a_step) for item in self._ids.get(number, [])]


class Loaded(Dataset[Any]):
    """A dataset that returns collated batches, drawn from the seed of each."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self._collate = dataset, collate

    def __getattr__(self, name: str) -> Any:  # of the user's dataset
        if name in ("dataset", "_collate", "__getstate__", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[tuple[int, Any]]) -> Any:
        is_training_process = get_worker_info() is None
        with preserved_generators() if is_training_process else nullcontext():
            seed_cpu_generators(keys[0][0])
            indices = [index for _, index in keys]
            load = getattr(self.dataset, "__getitems__", None)
            samples = load(indices) if callable(load) else [self.dataset[index] for index in indices]
            return self._collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def seed_batches(loader: Any, seed: int, rank: int, limit: int | None) -> Places | None:
    """Let a loader, or the loader within accelerate's, draw by place; None for a stream, which has no places.

    `limit` cuts each pass to a number of batches.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset) or base.batch_sampler is None:
        return None
    if isinstance(base.batch_sampler, Places):  # Trainer keeps an evaluation's loader with persistent workers
        return base.batch_sampler
    places = Places(base.batch_sampler, seed, rank, limit)
    changes = {
        "dataset": Loaded(base.dataset, base.collate_fn),
        "collate_fn": _as_it_is,
        "batch_sampler": places,
        "generator": torch.Generator().manual_seed(seed),  # else each pass draws from the training's
    }
    vars(base).update(changes)  # DataLoader's own are read-only
    return places
