"""Batches of an evaluation, loaded here or by worker processes ahead of their turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from jobkit.run.device_kinds import has_streams
from jobkit.train.batches import NOT_YET, HandOut
from jobkit.train.loader_options import InitWorker
from jobkit.train.seeds import derive_seed, seed_cpu_generators

Collate = Callable[[list[Any]], Any]


class CollatedBatches(Dataset[Any]):
    """Batch number `i` of a dataset, collated: the same whichever process loads it.

    Random numbers that the dataset draws for a sample come from (seed, sample), those of `collate_fn` from
    (seed, batch); the generators of this process are seeded.
    """

    def __init__(
        self, dataset: Any, length: int, batch_size: int, seed: int, collate_fn: Collate | None = None
    ) -> None:
        self.dataset, self.length, self.batch_size = dataset, length, batch_size
        self.seed = seed
        self.collate_fn = collate_fn or default_collate

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, None if number == NOT_YET else self.load(number)

    def of_worker(self, number: int) -> Any:
        """The user's dataset."""
        return self.dataset

    def load(self, number: int) -> Any:
        """The batch alone."""
        samples = []
        for sample in range(number * self.batch_size, min(self.length, (number + 1) * self.batch_size)):
            seed_cpu_generators(derive_seed(self.seed, "sample", 0, sample))
            samples.append(self.dataset[sample])
        seed_cpu_generators(derive_seed(self.seed, "collate", number))
        return self.collate_fn(samples)


def loaded(
    batches: CollatedBatches, hand_out: HandOut, device: torch.device, *, num_workers: int = 0, **options: Any
) -> Generator[tuple[int, Callable[[], Any]]]:
    """(number, what returns the batch) of each that is handed to this rank; to be closed, which ends the workers.

    `options` are DataLoader's for its workers: prefetch_factor, worker_init_fn, multiprocessing_context, timeout.
    """
    if not num_workers:
        yield from ((number, partial(batches.load, number)) for number in hand_out)
        return
    reserved = _Reserved(hand_out)
    loader = DataLoader(
        batches,
        sampler=reserved,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=has_streams(device.type),
        # A generator of its own: DataLoader would draw its base seed from the training's.
        generator=torch.Generator().manual_seed(0),
        **{**options, "worker_init_fn": InitWorker(options.get("worker_init_fn"))},
    )
    iterator = iter(loader)
    try:
        while hand_out.proceed() and (found := _next(iterator)) is not None:
            yield found[0], partial(_as_it_is, found[1])
            reserved.held -= 1
    finally:
        # What DataLoader's iterator does when nobody refers to it; the traceback of an error may do so for long.
        iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Reserved:
    """The numbers for DataLoader, which asks for another one each time it returns a batch, and at first for several.

    It always keeps equally many tasks under way: where this rank has reserved enough, one with nothing to do.
    """

    def __init__(self, hand_out: HandOut) -> None:
        self.hand_out = hand_out
        self.held = 0
        """Reserved and not yet computed."""

    def __iter__(self) -> Iterator[int]:
        while (number := self.hand_out.take(self.held)) is not None:
            self.held += number != NOT_YET
            yield number


def _next(iterator: Iterator[tuple[int, Any]]) -> tuple[int, Any] | None:
    return next((found for found in iterator if found[0] != NOT_YET), None)


def _as_it_is(batch: Any) -> Any:
    return batch
