"""A function of every sample of a dataset, over all ranks: each sample exactly once, whatever the world size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from jobkit.group import RankGroup
from jobkit.train.ahead import Collate, CollatedBatches, loaded
from jobkit.train.batches import HandOut, LockstepBatches
from jobkit.train.nested import to_device
from jobkit.train.outputs import Outputs
from jobkit.train.seeds import derive_seed, preserved_generators, seed_generators

PerSample = Callable[[Any, Tensor], Tensor]
"""`function(batch, ids)`: one value for each of a batch's samples, [n]; `ids`, int64 [n], are their numbers."""

Metrics = Callable[[Any, Tensor], Mapping[str, Tensor]]
"""The same for several metrics at once: {name: [n]}."""


def evaluate(
    function: PerSample | Metrics,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    batches: Iterable[int] | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> float | dict[str, float]:
    """The mean of what `function` returns over the dataset, on every rank; a dict of means where it returns a dict.

    Which batches this rank computes is for `batches` to say: DynamicBatches or LockstepBatches of jobkit.train.batches,
    or by default every W-th. `group` is one of a backend for the CPU. `options` are those of `computed`. Raises
    ValueError where no rank computed one of the batches.
    """
    scores = Outputs(len(dataset), batch_size)  # type: ignore[arg-type]
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    ranks = RankGroup.of(group or dist.group.WORLD if several else None)
    if batches is None:
        batches = scores.missing()[ranks.rank :: ranks.world_size]
    hand_out = batches if isinstance(batches, HandOut) else LockstepBatches(list(batches), 0, 1)
    with closing(computed(as_scores(function), dataset, scores, hand_out, **options)) as results:
        for number, output in results:
            scores.add(number, output)
    scores.agree(ranks)
    if missing := scores.missing():
        raise ValueError(f"no rank computed batch {missing[0]} of {len(scores.known)}")
    return means(scores.gathered(ranks))


def computed(
    function: Callable[[Any, Tensor], Any],
    dataset: Any,
    outputs: Outputs,
    batches: HandOut,
    *,
    device: torch.device | None = None,
    seed: int = 0,
    collate_fn: Collate | None = None,
    **workers: Any,
) -> Generator[tuple[int, Any]]:
    """(number, what `function(batch, ids)` returns) for the batches handed to this rank; to be closed.

    `batch` is collated and on the device. Gradients are off; random numbers drawn by `function`, or by the dataset for
    a sample, come from (seed, batch) and (seed, sample), and the caller's generators are as before after each batch.
    `workers` are DataLoader's options: with `num_workers` so many processes load batches ahead, as many as
    `prefetch_factor` each.
    """
    device = device or torch.device("cpu")
    collated = CollatedBatches(dataset, outputs.length, outputs.batch_size, seed, collate_fn)
    with closing(loaded(collated, batches, device, **workers)) as found:
        for number, load in found:
            ids = outputs.ids(number).to(device)
            with torch.no_grad(), preserved_generators(device):
                batch = to_device(load(), device)
                seed_generators(derive_seed(seed, "evaluate", number), device)
                output = function(batch, ids)
            yield number, output


def as_scores(function: PerSample | Metrics) -> Callable[[Any, Tensor], Tensor | dict[str, Tensor]]:
    """`function`, with what it returns as float64; it raises ValueError where that is not one value a sample."""

    @functools.wraps(function)
    def scores(batch: Any, ids: Tensor) -> Tensor | dict[str, Tensor]:
        result = function(batch, ids)
        if not isinstance(result, Mapping):
            return _as_score(result, "", len(ids))
        if not result:
            raise ValueError("function returned an empty dict, expected a tensor for each name in it")
        return {name: _as_score(result[name], f" as {name!r}", len(ids)) for name in sorted(result)}

    return scores


def _as_score(values: Any, where: str, count: int) -> Tensor:
    found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    if found != f"shape {(count,)}":
        raise ValueError(f"function returned {found}{where}, expected one value for each of {count} samples")
    return values.detach().cpu().to(torch.float64)  # type: ignore[no-any-return]


def means(values: Tensor | Mapping[str, Tensor]) -> float | dict[str, float]:
    """The mean of values [n], or of each in a dict; exactly rounded, so that it depends on no order."""
    if isinstance(values, Mapping):
        return {name: _mean(one) for name, one in values.items()}
    return _mean(values)


def _mean(values: Tensor) -> float:
    if not values.isfinite().all():
        return float(values.mean())  # inf or nan, whatever the order; fsum refuses inf - inf
    return math.fsum(values.tolist()) / len(values)
