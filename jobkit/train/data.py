"""An endless, sharded, exactly resumable stream of global batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.run.device_kinds import has_streams
from jobkit.train.nested import to_device

T = TypeVar("T", covariant=True)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal parts give equal seeds on every machine and Python."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator, and leave those of accelerators alone."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and all of torch's generators."""
    seed_cpu_generators(seed)
    torch.manual_seed(seed)


@contextmanager
def preserved_generators(*devices: torch.device) -> Iterator[None]:
    """Put Python's, NumPy's and torch's CPU generator, and those of some devices, back as they were."""
    state = rng_state(*devices)
    try:
        yield
    finally:
        set_rng_state(state, *devices)


class SampleOrder:
    """Which samples make up global batch number `n`: a pure function of (length, global batch, seed, shuffle).

    The stream is the endless chain of one permutation an epoch, cut into global batches; a batch may cross from one
    epoch into the next, so that no sample is dropped or repeated within an epoch, whatever divides what.
    """

    def __init__(self, length: int, global_batch_size: int, seed: int, shuffle: bool) -> None:
        if length < 1:
            raise ValueError("the dataset is empty")
        self.length = length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, number: int) -> list[tuple[int, int]]:
        """The (epoch, sample id) pairs of a global batch."""
        first = number * self.global_batch_size
        return [self._at(position) for position in range(first, first + self.global_batch_size)]

    def share(self, number: int, rank: int, world_size: int) -> list[tuple[int, int]]:
        """One rank's contiguous part of a global batch; the parts of all ranks differ by at most one sample."""
        size = self.global_batch_size
        start, stop = size * rank // world_size, size * (rank + 1) // world_size
        first = number * size
        return [self._at(position) for position in range(first + start, first + stop)]

    def _at(self, position: int) -> tuple[int, int]:
        epoch, index = divmod(position, self.length)
        if not self.shuffle:
            return epoch, index
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            self._epoch, self._order = epoch, torch.randperm(self.length, generator=generator)
        return epoch, int(self._order[index])


class _Shares(Sampler[list[tuple[int, int]]]):
    def __init__(self, order: SampleOrder, first: int, rank: int, world_size: int) -> None:
        self.order, self.first, self.rank, self.world_size = order, first, rank, world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        number = self.first
        while True:
            yield self.order.share(number, self.rank, self.world_size)
            number += 1


class SeededDataset(Dataset[T], Generic[T]):
    """Gives each sample random numbers of its own, so that augmentation depends on (seed, epoch, sample) alone.

    Then a sample looks the same whichever rank and worker loads it, and after a resume. The generators of the training
    process are put back afterwards.
    """

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[T]:
        """A batch, as DataLoader asks for it: to put the generators back takes longer than many a sample."""
        # A worker process has nobody else's generators to spare.
        with nullcontext() if get_worker_info() is not None else preserved_generators():
            return [self._load(epoch, index) for epoch, index in keys]

    def __getitem__(self, key: tuple[int, int]) -> T:
        return self.__getitems__([key])[0]

    def _load(self, epoch: int, index: int) -> T:
        seed_cpu_generators(derive_seed(self.seed, "sample", epoch, index))
        return self.dataset[index]


class Loader:
    """`next(loader)` is this rank's share of the next global batch, on the device.

    Its state is the number of global batches handed out: exact whatever the loader has read ahead, and independent of
    the number of ranks and workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if global_batch_size < world_size:
            raise ValueError(
                f"global_batch_size {global_batch_size} leaves some of {world_size} ranks without a sample"
            )
        self.dataset = dataset
        self.device = device or torch.device("cpu")
        self.rank, self.world_size = rank, world_size
        self.position = 0
        """Global batches handed out."""
        self.current: int | None = None
        """Number of the global batch handed out last, or being loaded."""
        self._order = SampleOrder(len(dataset), global_batch_size, seed, shuffle)  # type: ignore[arg-type]
        self._seeded = SeededDataset(dataset, seed)
        self._num_workers, self._collate_fn = num_workers, collate_fn
        self._iterator: Iterator[Any] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples a batch, over all ranks."""
        return self._order.global_batch_size

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, with the fraction of the current one."""
        return self.position * self.global_batch_size / self._order.length

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            loader = DataLoader(
                self._seeded,
                batch_sampler=_Shares(self._order, self.position, self.rank, self.world_size),
                num_workers=self._num_workers,
                collate_fn=self._collate_fn,
                pin_memory=has_streams(self.device.type),
                # A generator of its own: DataLoader would draw its base seed from the training's.
                generator=torch.Generator().manual_seed(0),
            )
            self._iterator = iter(loader)
        self.current = self.position
        batch = next(self._iterator)
        self.position += 1
        return to_device(batch, self.device)

    def current_samples(self) -> list[int]:
        """Ids of this rank's samples in the current batch; none before the first."""
        if self.current is None:
            return []
        return [sample for _, sample in self._order.share(self.current, self.rank, self.world_size)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "length": self._order.length, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state; raises ValueError when the dataset or the global batch is another one."""
        own = self.state_dict()
        for key in ("length", "global_batch_size"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the checkpoint's loader has {key} {state[key]}, this one {own[key]}: not the same samples"
                )
        self.position = int(state["position"])
        self._iterator = None
