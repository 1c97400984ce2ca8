"""Streams in a run: what continues on another number of ranks, what on the same, and what says that it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from torch.utils.data import IterableDataset, TensorDataset

STEPS = 6


class Numbers(IterableDataset[int]):
    def __init__(self, numbers: range = range(100)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Shards(Numbers):
    def shard(self, num_shards: int, index: int) -> Numbers:
        return Numbers(self.numbers[index::num_shards])


def hugging_face() -> Any:
    pa, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable(pa.table({"number": list(range(100))}))
    # A fingerprint of its own: to make one, some releases of dill and pyarrow do not work together.
    return datasets.Dataset(table, fingerprint="numbers").to_iterable_dataset(num_shards=4)


STREAMS = {"whole": Numbers, "shards": Shards, "hugging face": hugging_face}


def train(ctx: Any, stream: str, stop: bool) -> list[list[int]]:
    loader = ctx.loader(STREAMS[stream](), global_batch_size=6)
    ctx.track(loader=loader)
    batches = []
    for _ in ctx.steps(STEPS):
        batch = next(loader)
        batches.append((batch["number"] if isinstance(batch, dict) else batch).tolist())
        if stop:
            stop_after(ctx, 2)
    return batches


def train_with_own_loader(ctx: Any, stop: bool, workers: int) -> list[list[int]]:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    part = TensorDataset(torch.arange(50) + 50 * ctx.rank)
    loader = stateful.StatefulDataLoader(part, batch_size=4, shuffle=True, num_workers=workers)
    ctx.track(per_rank={"loader": loader})
    batches, rest = [], iter(loader)
    for _ in ctx.steps(STEPS):
        batches.append(next(rest)[0].tolist())
        if stop:
            stop_after(ctx, 2)
    return batches


def test_a_stream_that_each_rank_reads_whole_continues_on_any_number_of_ranks(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, train, "whole", True) == [STOPPED] * 2
    (rest,) = attempt(1, tmp_path, train, "whole", False)
    assert list(itertools.chain(*rest)) == list(range(18, 36))


@pytest.mark.parametrize("stream", ["shards", "hugging face"])
def test_a_stream_in_parts_continues_on_as_many_ranks_and_says_so_on_others(tmp_path: Path, stream: str) -> None:
    if stream == "hugging face":
        hugging_face()
    wholes = attempt(2, tmp_path / "undisturbed", train, stream, False)
    assert isinstance(wholes[0], list), wholes[0]
    assert len({*itertools.chain(*wholes[0], *wholes[1])}) == 36
    assert attempt(2, tmp_path, train, stream, True) == [STOPPED] * 2
    (refusal,) = attempt(1, tmp_path, train, stream, False)
    assert "was written by 2 rank(s), and 1 are here: loader has a state of its own on each rank" in refusal
    assert attempt(2, tmp_path, train, stream, False) == [whole[3:] for whole in wholes]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_dataloader_of_the_users_own_continues_exactly(tmp_path: Path, workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    wholes = attempt(2, tmp_path / "undisturbed", train_with_own_loader, False, workers)
    assert attempt(2, tmp_path, train_with_own_loader, True, workers) == [STOPPED] * 2
    assert attempt(2, tmp_path, train_with_own_loader, False, workers) == [whole[3:] for whole in wholes]


def train_divided(ctx: Any) -> None:
    loader = ctx.loader(Numbers(range(ctx.rank, 100, ctx.world_size)), global_batch_size=6)
    ctx.track(loader=loader)
    for _ in ctx.steps(STEPS):
        next(loader)


def test_a_stream_that_each_rank_has_divided_already_is_not_divided_again(tmp_path: Path) -> None:
    for told in attempt(2, tmp_path, train_divided):
        assert "loader: first is" in told and "ctx.loader(..., sharded=True)" in told
