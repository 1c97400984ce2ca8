"""An endless, sharded, exactly resumable stream of global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch.utils.data import Dataset, Sampler, Subset, default_collate, get_worker_info

from jobkit.errors import UsageError
from jobkit.train.loader_options import LoaderOptions, Share, whole_number
from jobkit.train.nested import to_device
from jobkit.train.order import SampleOrder
from jobkit.train.seeds import derive_seed, preserved_generators, sample_seeds, seed_cpu_generators
from jobkit.train.streams import StreamSource, is_stream

AHEAD = 256
"""Samples whose order is computed at once."""


class _Shares(Sampler[list[tuple[int, int]]]):
    def __init__(self, order: SampleOrder, first: int, rank: int, world_size: int) -> None:
        self.order, self.first, self.rank, self.world_size = order, first, rank, world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        number, count = self.first, max(1, AHEAD * self.world_size // self.order.global_batch_size)
        while True:
            yield from self.order.shares(number, count, self.rank, self.world_size)
            number += count


class SeededBatches(Dataset[Any]):
    """Makes the batches of a dataset, and gives each sample random numbers of its own.

    So augmentation depends on (seed, epoch, sample) alone: a sample looks the same whichever rank and worker loads it,
    and after a resume. A dataset with `__getitems__` makes several at once: what it draws for them, and what
    `collate_fn` draws, depends on the first of these. A dataset with `set_epoch` is told each epoch once, in workers
    too; what it draws then depends on (seed, epoch). The generators of the training process are put back afterwards.
    """

    def __init__(self, dataset: Dataset[Any], share: Share, draws_an_epoch: int) -> None:
        self.dataset = dataset
        self._draws_an_epoch = draws_an_epoch
        """1 where a key's first number is the epoch itself, and not that of a draw by weights."""
        self._collate = share.options.collate_fn or default_collate
        self._of_epochs = share.of_epochs
        self._of_samples, self._of_batches = derive_seed(share.seed, "sample"), derive_seed(share.seed, "collate")

    def of_worker(self, number: int) -> Dataset[Any]:
        """The user's dataset."""
        return self.dataset

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """A batch, as DataLoader asks for it."""
        # To put the generators back takes longer than many a sample; a worker has nobody else's to spare.
        with nullcontext() if get_worker_info() is not None else preserved_generators():
            *of_samples, of_batch = sample_seeds([*[self._of_samples] * len(keys), self._of_batches], [*keys, keys[0]])
            samples = self._load(keys, of_samples)
            seed_cpu_generators(of_batch)
            return self._collate(samples)

    def _load(self, keys: Sequence[tuple[int, int]], seeds: Sequence[int]) -> Any:
        dataset, ids = self.dataset, [sample for _, sample in keys]
        while type(dataset) is Subset:  # its own __getitems__ would load sample after sample with one seed
            ids, dataset = [dataset.indices[sample] for sample in ids], dataset.dataset
        if callable(load := getattr(dataset, "__getitems__", None)):
            self._begin(dataset, keys[0][0])
            seed_cpu_generators(seeds[0])
            return load(ids)
        samples = []
        for (epoch, _), seed, sample in zip(keys, seeds, ids, strict=True):
            self._begin(dataset, epoch)
            seed_cpu_generators(seed)
            samples.append(dataset[sample])
        return samples

    def _begin(self, dataset: Any, number: int) -> None:
        epoch = number // self._draws_an_epoch
        if callable(getattr(dataset, "set_epoch", None)) and _is_another_epoch(dataset, epoch):
            seed_cpu_generators(derive_seed(self._of_epochs, "epoch", epoch))
            dataset.set_epoch(epoch)


_told: dict[int, tuple[Callable[[], Any], int]] = {}
"""The epoch that each dataset was told last, by its identity: another loader of the same dataset may be in another."""


def _is_another_epoch(dataset: Any, epoch: int) -> bool:
    """Whether a dataset was told another epoch last, or none; it counts as told from here on."""
    known, last = _told.get(id(dataset), (None, None))
    if known is not None and known() is dataset and last == epoch:
        return False
    try:
        reference: Callable[[], Any] = ref(dataset, partial(_told.pop, id(dataset)))
    except TypeError:  # of a class with __slots__: it is kept
        reference = partial(_itself, dataset)
    _told[id(dataset)] = reference, epoch
    return True


def _itself(value: Any) -> Any:
    return value


class Source(Protocol):
    """Where a Loader's batches come from. Its state is that after the last batch of `batches`."""

    @property
    def state_is_per_rank(self) -> bool:
        """Whether the state differs from rank to rank."""

    def batches(self, position: int) -> Iterator[Any]:
        """This rank's shares of the global batches from number `position` on."""

    def samples(self, number: int) -> list[int]:
        """Ids of this rank's samples in a global batch, where they have any."""

    def epochs(self, position: int) -> float:
        """Passes over the dataset up to a position."""

    def state(self) -> dict[str, Any]:
        """What `load` takes."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raises UsageError where it is of something else."""


class DatasetSource:
    """The batches of a dataset with a length, whose samples can be read in any order."""

    state_is_per_rank = False

    def __init__(
        self,
        dataset: Dataset[Any],
        share: Share,
        *,
        shuffle: bool,
        weights: Sequence[float] | torch.Tensor | None,
        skipped: Sequence[int],
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"the {type(dataset).__name__} of ctx.loader has no length: give it __len__, or make it an "
                "IterableDataset"
            )
        self._order = SampleOrder(len(dataset), share.global_batch_size, share.seed, shuffle, weights, skipped)
        self._made = SeededBatches(dataset, share, 1 if weights is None else len(dataset))
        self._share = share

    def batches(self, position: int) -> Iterator[Any]:
        """This rank's shares of the global batches from number `position` on."""
        shares = _Shares(self._order, position, self._share.rank, self._share.world_size)
        return self._share.options.batches(self._made, self._share, position, shares)

    def samples(self, number: int) -> list[int]:
        """Ids of this rank's samples in a global batch."""
        return [sample for _, sample in self._order.share(number, self._share.rank, self._share.world_size)]

    def epochs(self, position: int) -> float:
        """Passes over the dataset up to a position, with the fraction of the current one."""
        return position * self._order.global_batch_size / self._order.length

    def state(self) -> dict[str, Any]:
        """What the order follows from."""
        skipped = {"skipped": self._order.skipped} if self._order.skipped else {}
        return {"length": self._order.length, "order": self._order.kind, **skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises UsageError where a state is of another order."""
        own = self.state()
        if state["length"] != own["length"]:
            raise UsageError(f"the checkpoint's loader has length {state['length']}, this one {own['length']}")
        if state["order"] != own["order"]:
            raise UsageError(
                f"the checkpoint's loader has the order {state['order']!r}, this one {own['order']!r}: the rest of its "
                "epoch would be other samples"
            )
        self._order.skip(self._order.skipped or state.get("skipped", ()))


class Loader:
    """`next(loader)` is this rank's share of the next global batch, on the device.

    Its state is the number of global batches handed out: exact whatever the loader has read ahead, and independent of
    the number of ranks and workers. That of a stream (an IterableDataset) says besides how far it has been read.

    `shuffle` (on) is for datasets with a length; so are `weights`, which draw samples with replacement, in proportion.
    `name` tells loaders apart that draw from one seed. `sharded` says that a stream gives each rank other samples by
    itself (True), or has each rank read all of it (False); None leaves it to what the stream can. `own_state=False`
    has a stream continued by reading what has been read, where its state_dict does not say all. `skipped` are ids of
    samples that are left out, in whose place the next ones of the dataset come. The further options are those of
    LoaderOptions. Raises UsageError for options that do not fit.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        seed: int = 0,
        name: str = "",
        shuffle: bool | None = None,
        weights: Sequence[float] | torch.Tensor | None = None,
        sharded: bool | None = None,
        own_state: bool | None = None,
        skipped: Sequence[int] = (),
        **options: Any,
    ) -> None:
        others = ("global_batch_size", "name", "shuffle", "weights", "sharded", "own_state")
        made = LoaderOptions.of(options, others)
        global_batch_size = whole_number(global_batch_size)
        _check_batch_size(global_batch_size, world_size)
        self.dataset, self.name = dataset, name
        self.device = device or torch.device("cpu")
        self.rank, self.world_size = rank, world_size
        """Whose share it is, of how many."""
        self.global_batch_size = global_batch_size
        """Samples a batch, over all ranks."""
        self.position = 0
        """Global batches handed out."""
        self.is_trained_on = False
        """Whether a batch was drawn where gradients are on."""
        self.current: int | None = None
        """Number of the global batch handed out last, or being loaded."""
        own_seed = derive_seed(seed, "loader", name)
        share = Share(rank, world_size, global_batch_size, own_seed, seed, self.device, made)
        ordered = {"shuffle": shuffle or None, "weights": weights}
        streamed: dict[str, Any] = {"sharded": sharded, "own_state": own_state}
        self._source: Source
        if is_stream(dataset):
            if given := [key for key, value in ordered.items() if value is not None]:
                raise UsageError(f"{given[0]} of ctx.loader: a stream comes in an order of its own, so do it there")
            if skipped:
                raise UsageError("samples are to be left out, and those of a stream have no ids: leave them out there")
            self._source = StreamSource(dataset, share, **streamed)
        else:
            if given := [key for key, value in streamed.items() if value is not None]:
                raise UsageError(
                    f"{given[0]} of ctx.loader is for streams, and this dataset has a length: leave it out"
                )
            order: dict[str, Any] = {"shuffle": _shuffle(shuffle, weights), "weights": weights, "skipped": skipped}
            self._source = DatasetSource(dataset, share, **order)
        self._iterator: Iterator[Any] | None = None

    @property
    def state_is_per_rank(self) -> bool:
        """Whether each rank has a stream, and so a state, of its own."""
        return self._source.state_is_per_rank

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, with the fraction of the current one; of a stream, whole ones."""
        return self._source.epochs(self.position)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._source.batches(self.position)
        self.current = self.position
        try:
            batch = next(self._iterator)
        except Exception:
            # A script may go on after it. A dataset's next batch is the one after; a stream is read again.
            self.position += not is_stream(self.dataset)
            self._iterator = None
            raise
        self.position += 1
        self.is_trained_on = self.is_trained_on or torch.is_grad_enabled()
        return to_device(batch, self.device)

    def current_samples(self) -> list[int]:
        """Ids of this rank's samples in the current batch; none before the first."""
        return [] if self.current is None else self._source.samples(self.current)

    def samples_of(self, number: int) -> list[int]:
        """Ids of this rank's samples in a global batch, where they have any."""
        return self._source.samples(number)

    def state_dict(self) -> dict[str, Any]:
        own = {"position": self.position, "global_batch_size": self.global_batch_size, "name": self.name}
        return {**own, **self._source.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raises UsageError when it is of other samples, or of another order of them."""
        if "name" not in state:
            raise UsageError("the checkpoint was written by an older jobkit, whose loader had another order of samples")
        for key in ("name", "global_batch_size"):
            if state[key] != (own := getattr(self, key)):
                raise UsageError(
                    f"the checkpoint's loader has {key} {state[key]}, this one {own}: not the same samples"
                )
        if ("sharing" in state) != ("sharing" in self._source.state()):
            raise UsageError("the checkpoint's loader reads a stream and this one does not, or the other way round")
        self._source.load(state)
        self.position = int(state["position"])
        self._iterator = None


def _check_batch_size(size: Any, ranks: int) -> None:
    if not isinstance(size, int) or size < 1:
        found = f"{size!r}" if size else "none"
        raise UsageError(f"ctx.loader needs global_batch_size, the samples of a batch over all ranks, and got {found}")
    if size < ranks:
        raise UsageError(
            f"global_batch_size {size} leaves some of {ranks} ranks without a sample: give at least {ranks}"
        )


def _shuffle(shuffle: Any, weights: Any) -> bool:
    if not isinstance(shuffle, (bool, type(None))):
        raise UsageError(f"shuffle={shuffle!r} of ctx.loader: expected True or False; weights=... draws by weights")
    if weights is not None and shuffle is False:
        raise UsageError("weights of ctx.loader draw samples at random: leave shuffle=False out, or the weights")
    return True if shuffle is None else shuffle
