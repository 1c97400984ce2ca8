"""Evaluation over all ranks: each sample exactly once, and the same number whatever the world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from jobkit.train.data import SeededDataset, derive_seed, preserved_generators, seed_generators, to_device

PerSample = Callable[[Any, torch.Tensor], torch.Tensor]


def evaluate(
    function: PerSample,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | None = None,
    seed: int = 0,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    between_batches: Callable[[], None] = lambda: None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> float:
    """The mean over the dataset of `function(batch, ids)`, which returns one value a sample.

    `ids` is an int64 tensor [len(batch)] of sample numbers. The batches are cut the same way for every world size and
    dealt out whole, so that no sample's value depends on how many ranks there are; `total` sums a float64 tensor
    [len(dataset)] over the ranks. `between_batches` is called equally often on every rank, with the
    caller's generators. Gradients are off; random numbers drawn by `function` come from (seed, batch), and the
    caller's generators are as before afterwards.
    """
    device = device or torch.device("cpu")
    length = len(dataset)  # type: ignore[arg-type]
    batches = math.ceil(length / batch_size)
    values = torch.zeros(length, dtype=torch.float64)
    seeded = SeededDataset(dataset, seed)
    for round_start in range(0, batches, world_size):
        number = round_start + rank
        if number < batches:
            with torch.no_grad(), preserved_generators(device):
                ids = torch.arange(number * batch_size, min(length, (number + 1) * batch_size))
                seed_generators(derive_seed(seed, "evaluate", number))
                batch = to_device(collate_fn([seeded[(0, int(one))] for one in ids]), device)
                result = function(batch, ids.to(device))
                if result.shape != ids.shape:
                    raise ValueError(
                        f"function returned shape {tuple(result.shape)}, expected one value for each of {len(ids)}"
                    )
                values[ids] = result.detach().to("cpu", torch.float64)
        between_batches()
    # Each sample is non-zero on one rank alone, so the sum is exact; fsum does not depend on an order.
    return math.fsum(total(values).tolist()) / length
