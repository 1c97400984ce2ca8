"""Hugging Face's streams, whose state leaves the buffer of a shuffle out: no sample is lost, none comes twice.

Their state stays, too: each pass of an epoch begins with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from jobkit.data.foreign_loader import Pass
from jobkit.data.loader import Loader

datasets = pytest.importorskip("datasets")

LENGTH = 60


def numbers(shards: list[int]) -> Any:
    for shard in shards:
        yield from ({"x": 20 * shard + number} for number in range(20))


def stream(kind: str, shuffles: bool = True) -> IterableDataset[Any]:
    made = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2]})
    if kind == "arrow":
        made = datasets.Dataset.from_dict({"x": list(range(LENGTH))}).to_iterable_dataset(num_shards=3)
    if shuffles:
        made = made.shuffle(seed=1, buffer_size=10)
    result: IterableDataset[Any] = made.with_format("torch")
    return result


LOADERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda data: DataLoader(data, batch_size=4),
    "torchdata": lambda data: StatefulDataLoader(data, batch_size=4),
    "torchdata, with workers": lambda data: StatefulDataLoader(data, batch_size=4, num_workers=2),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["arrow", "generator"])
def test_a_shuffled_stream_goes_on_exactly_from_its_first_and_each_third_batch(kind: str, loader: str) -> None:
    whole = [batch["x"].tolist() for batch in LOADERS[loader](stream(kind))]  # plain torch
    assert sorted(itertools.chain.from_iterable(whole)) == list(range(LENGTH))
    state, seen = None, []
    while len(seen) < len(whole):
        part = Pass(LOADERS[loader](stream(kind)), 1, state)
        batches = iter(part)
        newest = next(batches, None)
        for _ in range(3 if seen else 1):
            if newest is not None:
                seen.append(newest["x"].tolist())
                part.taken += 1
                newest = next(batches, None)
        state = part.state_dict()
    assert seen == whole


@pytest.mark.parametrize("shuffles", [True, False])
@pytest.mark.parametrize("sets_epoch", [True, False])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["arrow", "generator"])
def test_passes_after_a_resumed_one_have_all_samples(kind: str, loader: str, sets_epoch: bool, shuffles: bool) -> None:
    def begin(epoch: int, data: Any) -> Any:
        if sets_epoch:
            data.set_epoch(epoch)
        return LOADERS[loader](data)

    def numbers(batches: Iterable[Any]) -> list[list[int]]:
        return [batch["x"].tolist() for batch in batches]

    data: Any = stream(kind, shuffles)
    whole = [numbers(begin(epoch, data)) for epoch in range(3)]  # plain torch
    part = Pass(begin(0, stream(kind, shuffles)), 1)
    batches = iter(part)
    begun = numbers(next(batches) for _ in range(3))
    part.taken += 3
    next(batches)
    data = stream(kind, shuffles)
    resumed = begun + numbers(Pass(begin(0, data), 1, part.state_dict()))
    assert [resumed, *(numbers(Pass(begin(epoch, data), epoch)) for epoch in (1, 2))] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_stream_of_ctx_loader_goes_on_exactly(workers: int) -> None:
    def make() -> Loader:
        return Loader(stream("arrow"), global_batch_size=6, seed=3, num_workers=workers)

    loader = make()
    whole = [next(loader)["x"] for _ in range(21)]
    assert len({int(number) for batch in whole[:10] for number in batch}) == LENGTH
    state, seen = None, []
    while len(seen) < 21:
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        seen += [next(loader)["x"] for _ in range(3)]
        state = loader.state_dict()
    assert torch.equal(torch.stack(seen), torch.stack(whole))
