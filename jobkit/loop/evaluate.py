"""A function of every sample of a dataset, over all ranks: each sample once, the same bits on any number of ranks.

    rank 0's store: a counter --next batch number--> the rank that is free --function(batch, ids)--> values [n]
    all ranks' values --gather--> in the order of the samples --> mean, exactly rounded

A slow rank computes fewer batches, and holds the others up by one batch at most. Where a forward is a collective, as
of sharded weights, the ranks take batches in rounds instead (`Rounds`). loop/evaluation.py calls this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from jobkit.data.batch import as_it_is, to_device
from jobkit.data.seeds import derive_seed, preserved_generators, seed_cpu_generators, seed_generators
from jobkit.data.workers import WorkerInit, fork_workers, outside_is_said

PerSample = Callable[[Any, Tensor], Any]
"""`function(batch, ids)` returns a value for each sample of a batch, [n], or a dict of such; `ids` are int64 [n]."""


class Batches(Dataset[Any]):
    """Batch number `i` of a dataset, collated: the same on every process that loads it.

    Random numbers that the dataset draws for a sample come from (seed, sample), `collate_fn`'s from (seed, batch).
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.collate_fn = collate_fn or default_collate

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def ids(self, number: int) -> range:
        """Return the samples of a batch."""
        return range(number * self.batch_size, min(len(self.dataset), (number + 1) * self.batch_size))

    def __getitem__(self, number: int) -> tuple[int, Any]:
        samples = []
        with outside_is_said():
            for sample in self.ids(number):
                seed_cpu_generators(derive_seed(self.seed, "sample", sample))
                samples.append(self.dataset[sample])
            seed_cpu_generators(derive_seed(self.seed, "collate", number))
            return number, self.collate_fn(samples)


class HandOut(Sampler[int]):
    """The numbers of the batches for this rank: the rank that asks next gets the next.

    `store` is shared by all ranks, and `key` names this evaluation's counter in it; without a store every batch is this
    rank's. Workers ask ahead: each holds a batch or two.
    """

    def __init__(self, numbers: Sequence[int], store: Store | None, key: str) -> None:
        self.numbers, self._store, self._key = numbers, store, key
        self.taken = 0
        """Handed out over all ranks, when this rank last asked."""

    def __iter__(self) -> Iterator[int]:
        while True:
            turn = self.taken if self._store is None else self._store.add(self._key, 1) - 1
            self.taken = min(turn + 1, len(self.numbers))
            if turn >= len(self.numbers):
                return
            yield self.numbers[turn]

    def stop(self) -> None:
        """Hand out no more, on any rank."""
        if self._store is not None:
            self._store.add(self._key, len(self.numbers))


class Rounds(Sampler[int]):
    """The numbers of the batches for this rank where all ranks make a forward together: as many on each.

    The last round is filled up with the first batches, whose results are there already.
    """

    def __init__(self, numbers: Sequence[int], rank: int, world_size: int) -> None:
        self.numbers, self._rank, self._world_size = numbers, rank, world_size
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self.numbers), self._world_size):
            self.taken = min(begin + self._world_size, len(self.numbers))
            yield self.numbers[(begin + self._rank) % len(self.numbers)]

    def stop(self) -> None:
        """Do nothing: the ranks stop together."""


def computed(
    function: PerSample, batches: Batches, hand_out: HandOut | Rounds, device: torch.device, **options: Any
) -> Iterator[tuple[int, Any]]:
    """Yield (number, `function(batch, ids)`) of this rank's batches, without gradients.

    The random numbers that `function` draws come from (seed, batch). Options are DataLoader's for its workers.
    """
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=hand_out,
        collate_fn=as_it_is,
        generator=torch.Generator().manual_seed(0),  # DataLoader would draw its base seed from the training's
        worker_init_fn=WorkerInit(options.pop("worker_init_fn", None)),
        **{**options, "prefetch_factor": 1 if options.get("num_workers") else None},
    )
    with preserved_generators(device), torch.no_grad():
        for number, batch in fork_workers(loader):
            ids = torch.tensor(batches.ids(number), device=device)
            seed_generators(derive_seed(batches.seed, "evaluate", number), device)
            yield number, function(to_device(batch, device), ids)


def as_values(result: Any, count: int) -> dict[str, Tensor]:
    """Return per-sample values as float64 on the CPU, by name; the name of a single metric is empty.

    Raises ValueError for a result that is not one value a sample.
    """
    named = dict(result) if isinstance(result, Mapping) else {"": result}
    for name, values in named.items():
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape != (count,):
            where = f" as {name!r}" if name else ""
            raise ValueError(f"function returned {shape}{where}, expected one value for each of {count} samples")
    return {name: values.detach().cpu().to(torch.float64) for name, values in named.items()}


def in_order(parts: Sequence[Mapping[int, Any]]) -> list[Any]:
    """Return the results of all batches, each once, from the ranks' {number: result}, in the order of their numbers."""
    results = {number: result for part in parts for number, result in part.items()}
    return [results[number] for number in sorted(results)]


def mean(values: Tensor) -> float:
    """Return the mean of values [n], exactly rounded, so that it depends on no order."""
    if not values.isfinite().all():
        return float(values.mean())  # inf or nan, whatever the order; fsum refuses inf - inf
    return math.fsum(values.tolist()) / len(values)
