"""Streams: the same samples on any number of ranks where each reads all, and exact where each has a part."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from jobkit.errors import JobkitError
from jobkit.train.data import Loader

LENGTH, SIZE, BATCHES = 11, 4, 9


class Lines(IterableDataset[torch.Tensor]):
    """Shuffles each epoch with the global generators, draws random numbers for each sample, and divides itself over
    workers as torch's documentation shows."""

    def __init__(self, ids: range = range(LENGTH)) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[torch.Tensor]:
        ids = list(self.ids)
        random.shuffle(ids)
        if (info := get_worker_info()) is not None:
            ids = ids[info.id :: info.num_workers]
        for one in ids:
            yield torch.tensor([one, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


class Stateful(Lines):
    """Knows how far it has been read, and its epoch."""

    at, epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        ids = list(self.ids)
        random.Random(self.epoch).shuffle(ids)
        while self.at < len(ids):
            self.at += 1
            yield torch.tensor([ids[self.at - 1], torch.rand(()).item()], dtype=torch.float64)
        self.at = 0


class Shards(Lines):
    """Has a way to be divided."""

    def shard(self, num_shards: int, index: int) -> Lines:
        if num_shards > len(self.ids):
            raise IndexError(f"{len(self.ids)} shards are all there is")
        return Lines(self.ids[index::num_shards])


def take(loader: Loader, count: int) -> list[list[list[float]]]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def ids_of(batches: list[list[list[float]]]) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


@pytest.mark.parametrize("stream", [Lines, Stateful])
def test_a_stream_gives_the_same_samples_on_any_number_of_ranks_and_workers_and_after_any_resume(
    stream: Callable[[], Any],
) -> None:
    def loader(**options: int) -> Loader:
        return Loader(stream(), global_batch_size=SIZE, seed=1, **options)

    whole = take(loader(), BATCHES)
    epochs = [ids_of(whole)[start : start + LENGTH] for start in (0, LENGTH, 2 * LENGTH)]
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs) and epochs[0] != epochs[1]
    for position in range(BATCHES):
        before = loader(num_workers=2 if position == 3 else 0)
        assert take(before, position) == whole[:position]
        halves = [loader(rank=rank, world_size=2, num_workers=2 if position == 4 else 0) for rank in range(2)]
        for half in halves:
            half.load_state_dict(before.state_dict())
        shares = [take(half, BATCHES - position) for half in halves]
        assert [first + second for first, second in zip(*shares, strict=True)] == whole[position:], position
        assert halves[0].state_dict() == halves[1].state_dict() and not halves[0].state_is_per_rank


@pytest.mark.parametrize(("own_state", "read"), [(None, SIZE), (False, 3 * SIZE)])
def test_a_stream_with_a_state_is_not_read_again_unless_its_state_is_not_to_be_used(
    own_state: bool | None, read: int
) -> None:
    class Counted(Stateful):
        read = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            for sample in super().__iter__():
                self.read += 1
                yield sample

    before = Loader(Counted(), global_batch_size=SIZE, own_state=own_state)
    take(before, 2)
    stream = Counted()
    after = Loader(stream, global_batch_size=SIZE, own_state=own_state)
    after.load_state_dict(before.state_dict())
    assert take(after, 1) == take(before, 1)
    assert stream.read == read


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("stream", "options"), [(Shards, {}), (Lines, {"sharded": True})])
def test_each_rank_and_worker_goes_on_with_its_own_part(stream: Any, options: dict[str, bool], workers: int) -> None:
    def loader(rank: int) -> Loader:
        place = {"rank": rank, "world_size": 2, "num_workers": workers}
        return Loader(stream(), global_batch_size=SIZE, seed=1, **place, **options)

    for rank in range(2):
        whole = take(loader(rank), BATCHES)
        for position in range(BATCHES) if not workers else (3, 4):
            before, after = loader(rank), loader(rank)
            assert take(before, position) == whole[:position]
            after.load_state_dict(before.state_dict())
            assert take(after, BATCHES - position) == whole[position:], (rank, position)
        assert after.state_is_per_rank


def test_parts_have_nothing_in_common_and_are_augmented_by_numbers_of_their_own() -> None:
    parts = [take(Loader(Shards(), global_batch_size=SIZE, rank=rank, world_size=2), 2) for rank in range(2)]
    assert not set(ids_of(parts[0])) & set(ids_of(parts[1]))
    assert len({sample[1] for part in parts for batch in part[1:] for sample in batch}) == SIZE


def test_a_state_for_another_number_of_workers_is_refused_where_each_has_a_part() -> None:
    two = Loader(Shards(), global_batch_size=SIZE, num_workers=2)
    with pytest.raises(JobkitError, match=r"was read by 2 worker\(s\) on each rank, and num_workers asks for 1"):
        Loader(Shards(), global_batch_size=SIZE).load_state_dict(two.state_dict())
    with pytest.raises(JobkitError, match="was split, this one is whole"):
        Loader(Lines(), global_batch_size=SIZE).load_state_dict(two.state_dict())


def test_the_trainings_random_numbers_are_untouched_by_a_stream() -> None:
    def generators() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))

    random.gauss(), np.random.randn()  # each keeps a second number, for the next call
    before = generators()
    take(Loader(Lines(), global_batch_size=SIZE), 4)
    assert generators() == before


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        (Lines(range(0)), {}, "the stream gives rank 0 no samples"),
        (Lines(range(1)), {"num_workers": 2, "sharded": True}, "gives worker 1 of 2 of rank 0 no samples"),
        (
            Shards(range(1)),
            {"num_workers": 2},
            "cannot be divided into 2 parts.*: 1 shards are all there is; give fewer",
        ),
        (Lines(), {"shuffle": True}, "shuffle of ctx.loader: a stream comes in an order of its own"),
        (Lines(), {"weights": [1.0]}, "weights of ctx.loader: a stream"),
    ],
)
def test_a_stream_that_cannot_be_shared_out_as_asked_is_refused(
    stream: Lines, options: dict[str, Any], message: str
) -> None:
    found = ""
    try:  # not pytest.raises: it keeps the frames, and torch waits ten seconds for workers that the collector ends
        take(Loader(stream, global_batch_size=SIZE, **options), 2)
    except JobkitError as error:
        found = str(error)
    assert re.search(message, found) and "\n" not in found, found


class OrderDrawnAtTheBeginning(Lines):
    """Draws an epoch's order where it is told of it."""

    def set_epoch(self, epoch: int) -> None:
        self.order = [self.ids[place] for place in torch.randperm(len(self.ids)).tolist()]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([one]) for one in self.order)


def test_an_order_that_is_drawn_where_an_epoch_begins_is_the_same_after_a_stop() -> None:
    whole = take(Loader(OrderDrawnAtTheBeginning(), global_batch_size=4), 12)
    first = Loader(OrderDrawnAtTheBeginning(), global_batch_size=4)
    take(first, 5)
    torch.manual_seed(99)
    again = Loader(OrderDrawnAtTheBeginning(), global_batch_size=4)
    again.load_state_dict(first.state_dict())
    assert take(again, 7) == whole[5:]
