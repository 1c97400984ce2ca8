"""The batches of a Trainer as a function of epoch and place, so that another attempt draws the same numbers.

    Trainer's DataLoader --seed_batches--> TrainerPlaces (order, skipped without loading) --> SeededDataset (samples)

Trainer itself skips the batches that are done. By default a random augmentation, or the masks of a collator, come from
the training's own generators, and a batch is loaded one step ahead of its step: these draws differ after a restart.
callback.py calls this; data/foreign_loader.py has the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from jobkit.data.batch import as_it_is
from jobkit.data.foreign_loader import SeededDataset, SeededSampler
from jobkit.data.seeds import derive_seed
from jobkit.data.workers import WorkerInit, fork_workers

AHEAD = 256
"""Batches whose order is read at a time: Trainer skips the done ones one by one."""


class TrainerPlaces(SeededSampler):
    """A batch sampler of the epochs of a Trainer; `limit` cuts each to a number of batches."""

    def __init__(self, sampler: Any, seed: int, rank: int, limit: int | None) -> None:
        super().__init__(sampler, 0, 0, 0, {}, AHEAD)
        self._seed, self._rank, self._limit = seed, rank, limit
        self._choose_draws(0)

    def __getattr__(self, name: str) -> Any:  # accelerate reads batch_size, drop_last ...
        if name == "_sampler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler) if self._limit is None else min(self._limit, len(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        self.ids.clear()
        return islice(super().__iter__(), len(self))

    def _choose_draws(self, epoch: int) -> None:
        self.base = derive_seed(self._seed, "order", epoch)  # equal on all ranks, which divide one order
        self.draws = derive_seed(self._seed, "batch", epoch, self._rank)

    def begin_epoch(self, epoch: int) -> None:
        """Choose the pass that the next iteration makes, also in the samplers within."""
        self._choose_draws(epoch)
        inner = self._sampler
        while inner is not None:
            if callable(set_epoch := getattr(inner, "set_epoch", None)):
                set_epoch(epoch)
            inner = getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)

    def steps_of(self, batches_a_step: int) -> int:
        """Return the number of steps of an epoch."""
        return max(1, -(-len(self) // batches_a_step))

    def ids_of(self, step: int, batches_a_step: int) -> list[int]:
        """Return the ids of a step's samples; `step` counts all epochs."""
        first = step % self.steps_of(batches_a_step) * batches_a_step
        return [item for number in range(first, first + batches_a_step) for item in self.ids.get(number, [])]


def seed_batches(loader: Any, seed: int, rank: int, limit: int | None) -> TrainerPlaces | None:
    """Let a loader, or the loader within accelerate's, draw by place; None for a stream, which has no places.

    `limit` cuts each pass to a number of batches.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset) or base.batch_sampler is None:
        return None
    if isinstance(base.batch_sampler, TrainerPlaces):  # Trainer keeps an evaluation's loader with persistent workers
        return base.batch_sampler
    places = TrainerPlaces(base.batch_sampler, seed, rank, limit)
    changes = {
        "dataset": SeededDataset(base.dataset, base.collate_fn),
        "collate_fn": as_it_is,
        "batch_sampler": places,
        "worker_init_fn": WorkerInit(base.worker_init_fn),
        "generator": torch.Generator().manual_seed(seed),  # else each pass draws from the training's
    }
    vars(base).update(changes)  # DataLoader's own are read-only
    fork_workers(base)
    return places
