"""The samples that a training sees: those of plain torch, or each once in an epoch, in an order of its own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from jobkit.wire.group import RankGroup

LENGTH = 24


def through_batches(ranks: RankGroup, folder: Path, shuffle: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Return the batches of this rank in plain torch, and those of ctx.batches."""
    expected, seen = plain.dealt(ranks, 2, shuffle), []
    ctx = make_context(folder, ranks, under_ctx.config())
    sampler: Any = DistributedSampler(range(LENGTH), ranks.world_size, ranks.rank, shuffle=shuffle)
    loader: Any = DataLoader(range(LENGTH), batch_size=2, sampler=sampler)
    for epoch in ctx.epochs(2, model=nn.Linear(1, 1)):
        sampler.set_epoch(epoch)
        seen += [batch.tolist() for batch in ctx.batches(loader)]
    return expected, seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_of_a_distributed_sampler_are_those_of_plain_torch(
    tmp_path: Path, world_size: int, shuffle: bool
) -> None:
    answers = run_ranks(through_batches, world_size, tmp_path, shuffle)
    for expected, seen in answers:
        assert seen == expected
    for epoch in (0, 1):  # DistributedSampler draws by its own generator, from the epoch
        half = slice(epoch * len(answers[0][1]) // 2, (epoch + 1) * len(answers[0][1]) // 2)
        assert sorted(sample for _, seen in answers for batch in seen[half] for sample in batch) == [*range(LENGTH)]


def shuffled(ranks: RankGroup, folder: Path, seed: int) -> list[list[int]]:
    """Return the samples of two epochs of a loader that torch's generator shuffles."""
    ctx = make_context(folder, ranks, under_ctx.config(seed=seed))
    loader: Any = DataLoader(range(LENGTH), batch_size=5, shuffle=True)
    return [
        [sample for batch in ctx.batches(loader) for sample in batch.tolist()]
        for _ in ctx.epochs(2, model=nn.Linear(1, 1))
    ]


def of_loaders(ranks: RankGroup, folder: Path, seed: int) -> dict[str, list[Any]]:
    """Return this rank's batches of two epochs of several loaders."""
    ctx = make_context(folder, ranks, under_ctx.config(seed=seed))
    data = torch.arange(LENGTH)
    loaders = {
        "first": ctx.loader(data, global_batch_size=6),
        "second": ctx.loader(data, global_batch_size=6),
        "named": ctx.loader(data, global_batch_size=6, name="first"),
        "in order": ctx.loader(data, global_batch_size=6, shuffle=False),
        "weighted": ctx.loader(torch.arange(3), global_batch_size=1200, weights=[0.0, 1.0, 3.0]),
    }
    ctx.track(**loaders)
    seen: dict[str, list[Any]] = {name: [] for name in loaders}
    for _ in ctx.steps(2 * LENGTH // 6):
        for name, loader in loaders.items():
            seen[name].append(next(loader).tolist())
    return seen


def orders(answers: list[dict[str, list[Any]]], name: str) -> list[list[int]]:
    """Return the order of each of the two epochs: the ranks' parts of each batch, one after the other."""
    batches = [list(chain(*parts)) for parts in zip(*(answer[name] for answer in answers), strict=True)]
    return [list(chain(*batches[: len(batches) // 2])), list(chain(*batches[len(batches) // 2 :]))]


def test_an_order_follows_from_seed_name_and_epoch_and_not_from_the_ranks(tmp_path: Path) -> None:
    alone = run_ranks(of_loaders, 1, tmp_path / "1", 0)
    reseeded = run_ranks(of_loaders, 1, tmp_path / "reseeded", 1)
    both = [(answers, name) for answers in (alone, reseeded) for name in ("first", "second", "named")]
    distinct = [order for answers, name in both for order in orders(answers, name)]
    assert all(sorted(order) == [*range(LENGTH)] for order in distinct)
    assert len({tuple(order) for order in distinct}) == len(distinct) == 2 * 3 * 2
    assert orders(alone, "in order") == 2 * [[*range(LENGTH)]]
    for world_size in (2, 3):
        answers = run_ranks(of_loaders, world_size, tmp_path / str(world_size), 0)
        assert all(orders(answers, name) == orders(alone, name) for name in alone[0])
    drawn = list(chain(*alone[0]["weighted"]))  # 9600 draws: a standard deviation is 42
    assert set(drawn) == {1, 2} and abs(drawn.count(2) - 7200) < 210
    assert alone[0]["weighted"][0] != alone[0]["weighted"][1]


def test_a_loader_that_torch_shuffles_has_each_sample_once_in_another_order_each_epoch(tmp_path: Path) -> None:
    answers = [run_ranks(shuffled, 1, tmp_path / str(seed), seed)[0] for seed in (0, 1)]
    assert all(sorted(epoch) == [*range(LENGTH)] for epochs in answers for epoch in epochs)
    assert len({tuple(epoch) for epochs in answers for epoch in epochs}) == 4
