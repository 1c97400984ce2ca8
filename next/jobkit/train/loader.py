"""ctx.loader: an endless, sharded, exactly resumable stream of global batches.

    SampleOrder --shares--> torch DataLoader (workers, collate) --this rank's part--> device

The state is a position and nothing else: batches that workers have loaded ahead are loaded again after a restart, and
each sample's random numbers follow from (seed, epoch, sample) alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from jobkit.errors import UsageError, nearest
from jobkit.log import log
from jobkit.train.batch import to_device
from jobkit.train.order import SampleOrder
from jobkit.train.seeds import derive_seed, preserved_generators, sample_seeds, seed_cpu_generators

AHEAD = 256
"""Samples whose order is computed at once."""

OPTIONS = (
    "num_workers",
    "collate_fn",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory",
    "timeout",
)
"""DataLoader's options that mean something here."""

INSTEAD = {
    "batch_size": "give global_batch_size, the samples of a batch over all ranks",
    "sampler": "give weights=... to draw with replacement, shuffle=False for the order of the dataset, or a Subset",
    "batch_sampler": "give global_batch_size, and weights=... or shuffle=False for another order",
    "generator": "leave it out: the order follows from the YAML's seed",
}
"""Options that users of DataLoader give by habit, and the option that does the same here."""


class _Shares(Sampler[list[tuple[int, int]]]):
    def __init__(self, order: SampleOrder, first: int, rank: int, world_size: int) -> None:
        self.order, self.first, self.rank, self.world_size = order, first, rank, world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        number, count = self.first, max(1, AHEAD * self.world_size // self.order.global_batch_size)
        while True:
            yield from self.order.shares(number, count, self.rank, self.world_size)
            number += count


class SeededBatches(Dataset[Any]):
    """Loads the batches of a dataset, each sample with random numbers of its own.

    So augmentation depends on (seed, epoch, sample) alone: a sample looks the same on every rank and worker, and after
    a restart. Draws of `collate_fn`, and of a dataset with `__getitems__`, depend on the first sample of the batch.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self._collate = dataset, collate_fn or default_collate
        self._of_samples, self._of_batches = derive_seed(seed, "sample"), derive_seed(seed, "collate")

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return a batch, as DataLoader asks for it."""
        # To put the generators back takes longer than many a sample, and a worker has nobody else's.
        with nullcontext() if get_worker_info() is not None else preserved_generators():
            of_samples = sample_seeds(self._of_samples, keys)
            (of_batch,) = sample_seeds(self._of_batches, keys[:1])
            samples = self._load([sample for _, sample in keys], of_samples)
            seed_cpu_generators(of_batch)
            return self._collate(samples)

    def _load(self, ids: Sequence[int], seeds: Sequence[int]) -> Any:
        if callable(load := getattr(self.dataset, "__getitems__", None)) and type(self.dataset).__module__ != SUBSET:
            seed_cpu_generators(seeds[0])
            return load(ids)
        samples = []
        for seed, sample in zip(seeds, ids, strict=True):
            seed_cpu_generators(seed)
            samples.append(self.dataset[sample])
        return samples


SUBSET = "torch.utils.data.dataset"
"""The module of Subset, whose `__getitems__` would load sample after sample with one seed."""


class Loader:
    """An iterator over this rank's parts of global batches, on its device.

    loader = Loader(dataset, global_batch_size=256, rank=0, world_size=4, seed=0)
    images, labels = next(loader)      # 64 samples
    loader.sample_ids                  # their 64 numbers in the dataset

    Raises UsageError for options that do not fit.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        shuffle: bool | None = None,
        weights: Sequence[float] | torch.Tensor | None = None,
        name: str = "0",
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        _check(dataset, global_batch_size, world_size, options)
        if weights is not None and shuffle is not None:
            raise UsageError("weights of ctx.loader draw samples at random: leave shuffle out, or the weights")
        self.dataset, self.global_batch_size, self.name = dataset, global_batch_size, name
        self.position = 0
        """Global batches handed out."""
        self._seed = derive_seed(seed, "loader", name)
        self._order = SampleOrder(len(dataset), global_batch_size, self._seed, shuffle is not False, weights)
        self._batches = SeededBatches(dataset, self._seed, options.pop("collate_fn", None))
        self._rank, self._world_size, self._options = rank, world_size, options
        self._device = device or torch.device("cpu")
        self._iterator: Iterator[Any] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, with the fraction of the current one."""
        return self.position * self.global_batch_size / self._order.length

    @property
    def sample_ids(self) -> list[int]:
        """Ids of this rank's samples in the batch that was handed out last; empty before the first."""
        if self.position == 0:
            return []
        return [sample for _, sample in self._order.share(self.position - 1, self._rank, self._world_size)]

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        batch = next(self._iterator)
        self.position += 1
        return to_device(batch, self._device)

    def _begin(self) -> Iterator[Any]:
        shares = _Shares(self._order, self.position, self._rank, self._world_size)
        pin = self._options.get("pin_memory")
        loader = DataLoader(
            self._batches,
            batch_sampler=shares,
            collate_fn=_as_it_is,
            # A generator of its own: DataLoader would draw the seed of its workers from the training's.
            generator=torch.Generator().manual_seed(derive_seed(self._seed, "workers", self._rank, self.position)),
            **{**self._options, "pin_memory": self._device.type == "cuda" if pin is None else pin},
        )
        try:
            return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(f"ctx.loader cannot start workers: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "global_batch_size": self.global_batch_size, "length": self._order.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position. Where the code has another batch size or length now, the code's counts, and the
        samples done so far decide where the order goes on."""
        done = int(state["position"]) * int(state["global_batch_size"])
        for key, value in (("global_batch_size", self.global_batch_size), ("length", self._order.length)):
            if state[key] != value:
                what = "global_batch_size" if key == "global_batch_size" else "number of samples"
                log.warning("the %s of loader %s was %s, and is %s now", what, self.name, state[key], value)
        self.position = done // self.global_batch_size
        self._iterator = None


def _check(dataset: Any, global_batch_size: Any, world_size: int, options: Mapping[str, Any]) -> None:
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"the {type(dataset).__name__} of ctx.loader has no length: give it __len__, or loop over a DataLoader of "
            "it with ctx.epochs and ctx.batches"
        )
    for name in options:
        if name in INSTEAD:
            raise UsageError(f"ctx.loader takes no {name}: {INSTEAD[name]}")
        if name not in OPTIONS:
            hint = nearest(name, [*OPTIONS, "global_batch_size", "shuffle", "weights", "name"])
            raise UsageError(f"ctx.loader takes no {name}{f': {hint}' if hint else ''}")
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise UsageError(
            f"ctx.loader: global_batch_size is {global_batch_size!r}, expected the samples of a batch over all ranks"
        )
    if global_batch_size < world_size:
        raise UsageError(
            f"ctx.loader: global_batch_size {global_batch_size} leaves some of {world_size} ranks without a sample"
        )


def _as_it_is(batch: Any) -> Any:
    return batch
