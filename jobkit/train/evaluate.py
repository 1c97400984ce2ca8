"""Evaluation over all ranks: each sample exactly once, and the same number whatever the world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from jobkit.train.hooks import uncompiled
from jobkit.train.nested import to_device
from jobkit.train.scores import SampleScores, place
from jobkit.train.seeds import derive_seed, preserved_generators, seed_cpu_generators, seed_generators

PerSample = Callable[[Any, Tensor], Tensor]
"""`function(batch, ids)`: one value for each of a batch's samples, [n]; `ids`, int64 [n], are their numbers."""

Metrics = Callable[[Any, Tensor], Mapping[str, Tensor]]
"""The same for several metrics at once: {name: [n]}."""

Collate = Callable[[list[Any]], Any]


def evaluate(
    function: PerSample | Metrics,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    batches: Iterable[int] | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    collate_fn: Collate = default_collate,
) -> float | dict[str, float]:
    """The mean of what `function` returns over the dataset, on every rank; a dict of means where it returns a dict.

    Which batches this rank computes is for `batches` to say: DynamicBatches or LockstepBatches of jobkit.train.batches,
    or by default every W-th. `group` is one of a backend for the CPU. For the rest see `compute`. Raises ValueError
    where no rank computed one of the batches.
    """
    scores = SampleScores(len(dataset), batch_size)  # type: ignore[arg-type]
    if batches is None:
        rank, world_size = place(group)
        batches = scores.missing()[rank::world_size]
    compute(scores, function, dataset, batches, device=device, seed=seed, collate_fn=collate_fn)
    scores = scores.gathered(group)
    if missing := scores.missing():
        raise ValueError(f"no rank computed batch {missing[0]} of {len(scores.known)}")
    return means(scores.result())


def compute(
    scores: SampleScores,
    function: PerSample | Metrics,
    dataset: Dataset[Any],
    batches: Iterable[int],
    *,
    device: torch.device | None = None,
    seed: int = 0,
    collate_fn: Collate = default_collate,
) -> None:
    """Add to `scores` what `function(batch, ids)` returns for the batches of these numbers, taken one by one.

    `batch` is collated and on the device. Gradients are off; random numbers drawn by `function`, or by the dataset for
    a sample, come from (seed, batch) and (seed, sample), and the caller's generators are as before after each batch.
    """
    device = device or torch.device("cpu")
    # Seeding the generators of accelerators costs a millisecond even where there are none.
    seed_all = seed_cpu_generators if device.type == "cpu" else seed_generators
    for number in batches:
        ids = scores.ids(number)
        with torch.no_grad(), preserved_generators(device):
            samples = []
            for one in ids.tolist():
                seed_cpu_generators(derive_seed(seed, "sample", 0, one))
                samples.append(dataset[one])
            seed_all(derive_seed(seed, "evaluate", number))
            batch = to_device(collate_fn(samples), device)
            scores.add(number, function(batch, ids.to(device)))


def means(values: Tensor | Mapping[str, Tensor]) -> float | dict[str, float]:
    """The mean of values [n], or of each in a dict; exactly rounded, so that it depends on no order."""
    if isinstance(values, Mapping):
        return {name: _mean(one) for name, one in values.items()}
    return _mean(values)


def _mean(values: Tensor) -> float:
    if not values.isfinite().all():
        return float(values.mean())  # inf or nan, whatever the order; fsum refuses inf - inf
    return math.fsum(values.tolist()) / len(values)


@contextmanager
def independent_forwards(models: Iterable[Any]) -> Iterator[None]:
    """While inside, ranks may call DDP models as often as they like, each for itself; entered by all ranks together.

    DDP sends rank 0's buffers (BatchNorm's statistics) to all ranks before a forward pass, which would wait for ranks
    that have no batch. Here they are sent once, so that all ranks evaluate the same model.
    """
    inner = map(uncompiled, models)
    replicated = [model for model in inner if isinstance(model, DistributedDataParallel)]
    before = [model.require_forward_param_sync for model in replicated]
    for model in replicated:
        model.require_forward_param_sync = True  # off after a forward pass without gradients, on this rank perhaps
        if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            model._sync_buffers()  # type: ignore[no-untyped-call]
        model.require_forward_param_sync = False
    try:
        yield
    finally:
        for model, value in zip(replicated, before, strict=True):
            model.require_forward_param_sync = value
