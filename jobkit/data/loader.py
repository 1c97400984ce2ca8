"""ctx.loader: an endless, sharded, exactly resumable stream of global batches.

    SampleOrder --shares--> torch DataLoader (workers, collate) --this rank's part--> device
    a stream --streams.py------^

The state is the number of samples that are done, and nothing else: batches that workers have loaded ahead are loaded
again after a restart, and each sample's random numbers follow from (seed, epoch, sample) alone. A stream may add a
state of its own. loop/context.py makes the loaders.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from jobkit.data.batch import as_it_is, to_device
from jobkit.data.order import SampleOrder
from jobkit.data.seeds import (
    derive_seed,
    preserved_but_in_worker,
    preserved_generators,
    sample_seeds,
    seed_cpu_generators,
)
from jobkit.data.streams import Stream, is_stream
from jobkit.data.workers import WorkerInit, fork_workers, outside_is_said
from jobkit.errors import UsageError, nearest
from jobkit.log import log

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
    "sharded": "leave it out: ranks divide a stream that has num_shards and shard(), and else each reads all of it",
    "own_state": "leave it out: a stream without state_dict and load_state_dict is read again up to its place",
}
"""Options that users of DataLoader give by habit, and the option that does the same here."""


class _Shares(Sampler[list[tuple[int, int]]]):
    def __init__(self, order: SampleOrder, begin: int, rank: int, world_size: int) -> None:
        self.order, self.begin, self.rank, self.world_size = order, begin, rank, world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        begin, size = self.begin, self.order.global_batch_size
        count = max(1, AHEAD * self.world_size // size)
        while True:
            yield from self.order.shares(begin, count, self.rank, self.world_size)
            begin += count * size


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
        with outside_is_said(), preserved_but_in_worker():
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
        gather: Callable[[Any], list[Any]] | None = None,
        **options: Any,
    ) -> None:
        _check(global_batch_size, world_size, options)
        if weights is not None and shuffle is not None:
            raise UsageError("weights of ctx.loader draw samples at random: leave shuffle out, or the weights")
        self.dataset, self.global_batch_size, self.name = dataset, global_batch_size, name
        self.done = 0
        """Samples handed out, on all ranks together."""
        self._seed = derive_seed(seed, "loader", name)
        collate_fn = options.pop("collate_fn", None)
        self._rank, self._world_size, self._options = rank, world_size, options
        self._device = device or torch.device("cpu")
        self._iterator: Iterator[Any] | None = None
        self._said: set[tuple[str, Any]] = set()
        self.see: Callable[[Any], None] = lambda batch: None
        """Called with each batch of a stream; a verification compares them."""
        self.stream: Stream | None = None
        """How the stream is divided; None for a dataset with a length."""
        if is_stream(dataset):
            if shuffle or weights is not None:
                raise UsageError("ctx.loader: a stream has the order in which it is read: let the stream shuffle")
            self.stream = Stream(dataset, global_batch_size, rank, world_size, self._seed, collate_fn, gather)
        else:
            self._order = SampleOrder(len(dataset), global_batch_size, self._seed, shuffle is not False, weights)
            self._batches = SeededBatches(dataset, self._seed, collate_fn)

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, with the fraction of the current one; of a stream whole passes."""
        return self.stream.epoch if self.stream is not None else self.done / self._order.length

    @property
    def is_uneven(self) -> bool:
        """True if some ranks have a sample more in a global batch than others."""
        return self.global_batch_size % self._world_size != 0

    @property
    def sample_ids(self) -> list[int]:
        """Ids of this rank's samples in the batch that was handed out last; empty before the first, and for streams."""
        return self.ids_of(self.done)

    def ids_of(self, done: int) -> list[int]:
        """Return the ids of this rank's samples in the batch with which `done` samples were handed out."""
        if done < self.global_batch_size or self.stream is not None:
            return []
        return [sample for _, sample in self._order.share(done - self.global_batch_size, self._rank, self._world_size)]

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        if self.stream is None:
            batch = next(self._iterator)
        else:
            with nullcontext() if self._options.get("num_workers") else preserved_generators():
                batch = self.stream.take(next(self._iterator))
            self.see(batch)
        self.done += self.global_batch_size
        return to_device(batch, self._device)

    def _begin(self) -> Iterator[Any]:
        pin = self._options.get("pin_memory")
        if self.stream is None:
            shares = _Shares(self._order, self.done, self._rank, self._world_size)
            source: dict[str, Any] = {"dataset": self._batches, "batch_sampler": shares}
        else:
            source = {"dataset": self.stream.reader(self.done), "batch_size": None}
        loader = DataLoader(
            collate_fn=as_it_is,
            # A generator of its own: DataLoader would draw the seed of its workers from the training's.
            generator=torch.Generator().manual_seed(derive_seed(self._seed, "workers", self._rank, self.done)),
            **source,
            **{
                **self._options,
                "pin_memory": self._device.type == "cuda" if pin is None else pin,
                "worker_init_fn": WorkerInit(self._options.get("worker_init_fn")),
            },
        )
        try:
            return iter(fork_workers(loader))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(f"ctx.loader cannot start workers: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        state = {"samples": self.done, "global_batch_size": self.global_batch_size}
        more = {"length": self._order.length} if self.stream is None else {"stream": self.stream.state_dict()}
        return state | more

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the samples that are done. Where the code has another batch size or length now, the code's
        counts. Raises UsageError where a stream was none before."""
        self.done, self._iterator = int(state["samples"]), None
        before, size = state["global_batch_size"], self.global_batch_size
        if before != size:
            self._say("global_batch_size", before, size, f"it goes on after the {self.done} samples that are done")
        if ("stream" in state) != (self.stream is not None):
            raise UsageError(f"loader {self.name}: the checkpoint's dataset and the code's are not both streams")
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"], self.done, self._say)
        elif state["length"] != (length := self._order.length):
            epoch, samples = divmod(self.done, int(state["length"]))
            self.done = epoch * length + min(samples, length)
            now = f"epoch {epoch} goes on after {min(samples, length)} samples, in another order"
            self._say("number of samples", state["length"], length, now)

    def _say(self, what: str, before: Any, now: Any, consequence: str) -> None:
        """Warn on rank 0 that the code has changed, once: a state may be loaded several times."""
        if self._rank == 0 and (what, before) not in self._said:
            log.warning("the %s of loader %s was %s, and is %s now: %s", what, self.name, before, now, consequence)
        self._said.add((what, before))


def _check(global_batch_size: Any, world_size: int, options: Mapping[str, Any]) -> None:
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
