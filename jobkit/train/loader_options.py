"""How a loader makes its batches: the options of torch's DataLoader that mean something here."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torchs_worker

from jobkit.errors import UsageError, nearest
from jobkit.run.device_kinds import has_streams
from jobkit.train.seeds import derive_seed

INSTEAD = {
    "batch_size": "give global_batch_size, the samples of a batch over all ranks",
    "sampler": "give weights=... to draw with replacement, shuffle=False for the order of the dataset, "
    "or a torch.utils.data.Subset",
    "batch_sampler": "give global_batch_size, and weights=... or shuffle=False for another order",
    "drop_last": "leave it out: the loader is endless, and none of its batches is incomplete",
    "generator": "leave it out: the order follows from the YAML's seed",
    "in_order": "leave it out: batches come in the order that a resume repeats",
    "pin_memory_device": "leave it out: batches are pinned for ctx.device",
}
"""What users of DataLoader give by habit, and what does the same here."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What DataLoader does with it, in the words of its documentation."""

    num_workers: int = 0
    """Processes that make batches; 0 makes them in the training's own."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """A batch from a list of samples; by default torch's default_collate."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number, before it loads anything."""
    prefetch_factor: int | None = None
    """Batches that each worker makes in advance, 2 by default."""
    persistent_workers: bool = False
    """Accepted: an endless loader's workers live as long as it does."""
    multiprocessing_context: str | BaseContext | None = None
    """How workers are started: fork, forkserver or spawn; by default as Python does."""
    pin_memory: bool | None = None
    """Whether batches are copied to pinned memory; by default where the device copies from it beside the program."""
    timeout: float = 0
    """Seconds to wait for a batch of a worker, 0 for ever."""

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Collection[str]) -> LoaderOptions:
        """The options that a user gave, `others` being further names that would have been right.

        Raises UsageError for one that is unknown or cannot be.
        """
        own = [field.name for field in fields(cls)]
        # What changes nothing may be given: a script's settings often are passed on as they are.
        options = {name: value for name, value in options.items() if value is not None or name not in own}
        if options.get("drop_last") is False:
            del options["drop_last"]
        for name in options:
            if name in INSTEAD:
                raise UsageError(f"ctx.loader takes no {name}: {INSTEAD[name]}")
            if name not in own:
                raise UsageError(
                    f"ctx.loader takes no {name}{nearest(name, [*own, *others])} "
                    f"(it takes {', '.join([*others, *own])})"
                )
        made = cls(**{name: whole_number(value) for name, value in options.items()})
        made._check()
        return made

    def _check(self) -> None:
        _check_number("num_workers", self.num_workers, int, 0)
        _check_number("prefetch_factor", self.prefetch_factor, int, 1)
        _check_number("timeout", self.timeout, (int, float), 0)
        for name in ("collate_fn", "worker_init_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(f"{name}={value!r} of ctx.loader: expected a function")
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            if getattr(self, name) and self.num_workers == 0:
                raise UsageError(f"{name} of ctx.loader needs workers: give num_workers too, or leave {name} out")
        context, methods = self.multiprocessing_context, multiprocessing.get_all_start_methods()
        if isinstance(context, str) and context not in methods:
            raise UsageError(
                f"multiprocessing_context={context!r} of ctx.loader: expected one of {', '.join(methods)}"
                f"{nearest(context, methods)}"
            )

    def batches(
        self, dataset: Dataset[Any], share: Share, position: int, batch_sampler: Iterable[Any] | None = None
    ) -> Iterator[Any]:
        """What DataLoader hands on of a dataset that makes batches, from a position on; of a stream without a sampler.

        `dataset.of_worker(number)` is the user's own, of which its workers are to know.
        """
        device = share.device
        loader = DataLoader(
            dataset,
            **({"batch_size": None} if batch_sampler is None else {"batch_sampler": batch_sampler}),
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            worker_init_fn=InitWorker(self.worker_init_fn),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            multiprocessing_context=self.multiprocessing_context,
            pin_memory=has_streams(device.type) if self.pin_memory is None else self.pin_memory,
            timeout=self.timeout,
            # A generator of its own: DataLoader would draw the seed of its workers from the training's.
            generator=torch.Generator().manual_seed(derive_seed(share.seed, "workers", share.rank, position)),
        )
        try:
            return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self.num_workers == 0:
                raise
            raise UsageError(
                f"the loader's workers cannot be started: {error}; what is started by forkserver or spawn gets the "
                "dataset and its functions by pickle: define them at the top of a module, or give "
                "multiprocessing_context='fork'"
            ) from error


@dataclass(frozen=True)
class Share:
    """Whose share of the global batches a loader makes, from which seed, for which device, and how."""

    rank: int
    world_size: int
    global_batch_size: int
    seed: int
    """The loader's own."""
    of_epochs: int
    """The seed of what a dataset draws where it is told an epoch, which all loaders of the run have."""
    device: torch.device
    options: LoaderOptions


@dataclass
class InitWorker:
    """What a worker begins with: it knows the user's dataset, and not what reads it; then the user's function."""

    function: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        known = {"id": info.id, "num_workers": info.num_workers, "seed": info.seed}
        torchs_worker._worker_info = type(info)(**known, dataset=info.dataset.of_worker(number))
        if self.function is not None:
            self.function(number)


def whole_number(value: Any) -> Any:
    """A number of NumPy's as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.integer) else value


def _check_number(name: str, value: Any, kinds: Any, least: int) -> None:
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or value < least):
        kind = "a whole number" if kinds is int else "a number"
        raise UsageError(f"{name}={value!r} of ctx.loader: expected {kind} of at least {least}")


def _as_it_is(batch: Any) -> Any:
    return batch
