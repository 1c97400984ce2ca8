"""Loaders and streams in attempts that are broken off: together they see what one uninterrupted attempt sees."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import make_context, run_ranks
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from jobkit.data.foreign_loader import Pass
from jobkit.data.loader import Loader
from jobkit.data.trial import is_exact
from jobkit.errors import Stopped, UsageError
from jobkit.log import log
from jobkit.wire.group import RankGroup

LENGTH = 22


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    """Noisy samples of some numbers, divided over the workers; `shard` as Hugging Face's streams have it."""

    def __init__(self, numbers: range = range(LENGTH), num_shards: int = 1) -> None:
        self.numbers, self.num_shards = numbers, num_shards

    def shard(self, num_shards: int, index: int) -> Stream:
        return type(self)(self.numbers[index::num_shards], self.num_shards // num_shards)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for number in self.numbers if info is None else self.numbers[info.id :: info.num_workers]:
            yield torch.tensor([number, random.random(), torch.rand(()).item()])


class Resumable(Stream):
    """A stream that goes on from its state, in the pass that it is told."""

    place, read, epoch = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self.numbers):
            self.place, self.read = self.place + 1, self.read + 1
            yield torch.tensor([self.numbers[self.place - 1], random.random(), self.epoch])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Buffered(Resumable):
    """A stream that is shuffled in a buffer, which its state leaves out, as those of Hugging Face."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, buffer = random.Random(self.epoch), []
        while self.place < len(self.numbers):
            self.place, self.read = self.place + 1, self.read + 1
            buffer.append(torch.tensor([self.numbers[self.place - 1], random.random(), self.epoch]))
            if len(buffer) > 5:
                yield buffer.pop(order.randrange(6))
        yield from buffer
        self.place = 0


class Staying(Resumable):
    """A stream whose every pass begins with the state that it has loaded, as those of Hugging Face in one epoch."""

    start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in range(self.start, len(self.numbers)):
            self.place = place + 1
            yield torch.tensor([self.numbers[place]])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


class Continuing(Resumable):
    """A stream whose passes are of 10 numbers, and go on where the pass before ended."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place += 1
            yield torch.tensor([self.numbers[(self.place - 1) % LENGTH]])
            if self.place % 10 == 0:
                return


class InTurn:
    """A sampler with a state, which goes on where the pass before ended."""

    offset = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            self.offset += 5
            yield self.offset % LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


class OwnDraws(InTurn):
    """A sampler that draws from NumPy's generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rng.permutation(LENGTH).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Unsaved:
    """Such a sampler without a state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rng.permutation(LENGTH).tolist())


class UnsavedBatches(Unsaved):
    def __iter__(self) -> Iterator[Any]:
        return iter([[(int(a), "b"), (int(b), "c")] for a, b in self.rng.permutation(LENGTH).reshape(-1, 2)])


class Batched:
    """A sampler of batches with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(LENGTH - 2, generator=self.generator).view(-1, 4).tolist())


class Moved(DataLoader[Any]):
    """A loader that moves its batches, of torch's sampler."""

    def __iter__(self) -> Any:
        assert self.batch_sampler is not None
        size = self.batch_sampler.batch_size  # type: ignore[attr-defined]
        for batch in super().__iter__():
            yield batch.double() + size


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Endless(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader and Ultralytics' InfiniteDataLoader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Fast:
    """As DomainBed's FastDataLoader."""

    def __init__(self) -> None:
        batches = BatchSampler(RandomSampler(range(LENGTH)), 4, False)
        self.iterator = iter(DataLoader(Noisy(), batch_sampler=Repeated(batches)))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield next(self.iterator)


class Ahead:
    """It makes an iterator of each pass when that begins, and keeps it."""

    def __init__(self) -> None:
        self.loader = DataLoader(Noisy(), 4, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


DRAWN = [0.0]


class Started(Noisy):
    """Samples with the number that the worker has drawn as it started."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), DRAWN[0]])


def draw_as_it_starts(number: int) -> None:
    DRAWN[0] = random.random()


class WhoLoads(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid()])


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + random.random()


def distributed(ranks: RankGroup) -> Any:
    return DistributedSampler(Noisy(), ranks.world_size, ranks.rank)


# Loaders of a script


LOADERS: dict[str, Callable[[RankGroup], list[Any]]] = {
    "random": lambda ranks: [DataLoader(Noisy(), 4, shuffle=True)],
    "weighted": lambda ranks: [DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1, 2] * 11, 25))],
    "subset": lambda ranks: [DataLoader(Noisy(), 4, sampler=SubsetRandomSampler(range(3, LENGTH)), drop_last=True)],
    "set_epoch": lambda ranks: [DataLoader(Noisy(), 3, sampler=distributed(ranks))],
    "a sampler of batches": lambda ranks: [
        DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 4, False), collate_fn=noisy_collate)
    ],
    "no batches": lambda ranks: [DataLoader(Noisy(), batch_size=None, sampler=RandomSampler(range(9)))],  # type: ignore[arg-type]
    "a sampler with a state": lambda ranks: [DataLoader(Noisy(), 4, sampler=InTurn())],
    "a sampler with draws of its own": lambda ranks: [DataLoader(Noisy(), 4, sampler=OwnDraws())],
    "batches_with_a_generator": lambda ranks: [DataLoader(Noisy(), batch_sampler=Batched())],  # type: ignore[arg-type]
    "moved": lambda ranks: [Moved(Noisy(), 4, shuffle=True, num_workers=1)],
    "an_iterator_for_each_pass": lambda ranks: [Ahead()],
    "persistent workers": lambda ranks: [
        DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=noisy_collate)
    ],
    "a persistent worker that draws as it starts": lambda ranks: [
        DataLoader(Started(), 4, num_workers=1, persistent_workers=True, worker_init_fn=draw_as_it_starts)
    ],
    "persistent workers of single samples": lambda ranks: [
        DataLoader(Noisy(), batch_size=None, sampler=range(9), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    ],
    "a loader with persistent workers twice": lambda ranks: (
        [DataLoader(Noisy(), 4, num_workers=1, persistent_workers=True)] * 2
    ),
    "a generator": lambda ranks: [DataLoader(Noisy(), 4, True, generator=torch.Generator().manual_seed(1))],
    "an iterable": lambda ranks: [range(6)],
    "two loaders": lambda ranks: [DataLoader(Noisy(), 4, shuffle=True), DataLoader(Stream(), 3)],
    "a stream": lambda ranks: [DataLoader(Stream(), 4, num_workers=1, persistent_workers=True)],
    "a stream with a state": lambda ranks: [DataLoader(Resumable(), 4)],
    "a stream that loses its buffer": lambda ranks: [DataLoader(Buffered(), 4)],
    "a stateful loader of one": lambda ranks: [StatefulDataLoader(Buffered(), 4)],
    "a stateful loader of one, with workers": lambda ranks: [StatefulDataLoader(Buffered(), 4, num_workers=2)],
    "a stateful loader": lambda ranks: [StatefulDataLoader(Noisy(), 4, shuffle=True, num_workers=1)],
    "a stateful loader of a stream": lambda ranks: [StatefulDataLoader(Resumable(), 4)],
}


def epochs(ranks: RankGroup, folder: Path, name: str, attempt: int, stop: int | None) -> list[Any]:
    """Return the batches of an attempt, and a number drawn beside each; the attempt is broken off after a step."""
    ctx = make_context(folder, ranks, attempt=attempt)
    loaders = LOADERS[name](ranks)
    sampler = getattr(loaders[0], "sampler", None)
    tracked = {"sampler": sampler} if isinstance(sampler, InTurn) else {}
    seen = []
    try:
        for epoch in ctx.epochs(2, model=nn.Linear(1, 1), **tracked):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
            for number, batch in enumerate(tqdm(ctx.batches(*loaders), disable=True), ctx.batch):
                parts = batch if isinstance(batch, tuple) else (batch,)
                seen.append((epoch, number, [torch.as_tensor(part).tolist() for part in parts], torch.rand(()).item()))
                if ranks.is_main and ctx.step == stop:
                    ctx._rank.page.ask_to_stop()
                time.sleep(0.1 * (ranks.world_size - 1))  # several ranks agree now and then
    except Stopped:
        pass
    else:
        ctx.finish()
    ctx._tracked.close()
    return seen


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_that_is_broken_off_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    ranks = 2 if name == "set_epoch" else 1
    whole = run_ranks(epochs, ranks, tmp_path / "whole", name, 1, None)
    per_epoch = Counter(epoch for epoch, *_ in whole[0])[0]
    stops = [1, per_epoch - 1, per_epoch + 2, None]  # within an epoch, at its end, within the next
    attempts = [run_ranks(epochs, ranks, tmp_path / "stops", name, n, stop) for n, stop in enumerate(stops, 1)]
    lengths = [len(attempt[0]) for attempt in attempts[:3]]
    assert lengths == [2, per_epoch - 2, 3] or (ranks == 2 and 0 < lengths[0] < len(whole[0]))
    for rank in range(ranks):
        assert list(itertools.chain.from_iterable(attempt[rank] for attempt in attempts)) == whole[rank]


@pytest.mark.parametrize("persist", [True, False])
def test_workers_live_as_long_as_the_script_asks(persist: bool) -> None:
    loader = DataLoader(WhoLoads(), 4, shuffle=True, num_workers=2, persistent_workers=persist)
    processes = []
    for number in range(3):
        batches = iter(Pass(loader, number))
        processes.append({int(process) for batch in (batches if number != 1 else [next(batches)]) for process in batch})
        del batches  # the second pass is broken off
    assert len(processes[0]) == 2
    assert (processes[0] == processes[2]) is persist
    assert (processes[1] <= processes[0]) is persist


def test_a_pass_over_kept_workers_has_its_own_order_and_draws() -> None:
    loaders = [DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=kept) for kept in (True, False)]
    seen = [[torch.cat(list(Pass(loader, number))).tolist() for number in (0, 1, 0)] for loader in loaders]
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][2] != seen[0][1]


def test_torchdatas_loader_of_a_stream_is_exact_through_a_restart_at_every_batch() -> None:
    from jobkit.data.foreign_loader import Pass

    whole = [batch.tolist() for batch in Pass(StatefulDataLoader(Stream(), 3, num_workers=2), 1)]
    state, seen = None, []
    while len(seen) < len(whole):
        part = Pass(StatefulDataLoader(Stream(), 3, num_workers=2), 1, state)
        seen.append(next(iter(part)).tolist())
        part.taken += 1
        state = part.state_dict()
    assert seen == whole


def test_a_stream_with_a_state_is_not_read_again() -> None:
    from jobkit.data.foreign_loader import Pass

    for make in (DataLoader, StatefulDataLoader):
        stream = Resumable()
        part = Pass(make(stream, batch_size=4), 1, {"taken": 2, "skipped": 0, "sampler": None, "stream": None})
        first = next(iter(part))
        again = Resumable()
        following = next(iter(Pass(make(again, batch_size=4), 1, part.state_dict())))
        assert torch.equal(first, following)
        assert (stream.read, again.read) == (12, 4)


def test_a_stream_whose_state_is_not_exact_is_read_again_and_said_so(heard: pytest.LogCaptureFixture) -> None:
    from jobkit.data.foreign_loader import Pass

    for kind, read in ((Resumable, 4), (Buffered, 13)):
        part = Pass(DataLoader(kind(), batch_size=4), 1)
        batches = iter(part)
        for _ in range(2):
            next(batches)
            part.taken += 1
        expected = next(batches)  # read before the boundary at which the state is saved
        stream = kind()
        assert torch.equal(next(iter(Pass(DataLoader(stream, batch_size=4), 1, part.state_dict()))), expected)
        assert (kind, len(heard.messages), stream.read) == (kind, int(kind is Buffered), read + 4 * (kind is Buffered))


@pytest.mark.parametrize("kind", [Staying, Continuing, Resumable])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader, lambda stream, _: stream])
def test_the_pass_after_a_resumed_one_begins_where_the_stream_itself_would(kind: Any, make: Any) -> None:
    def numbers(batches: Iterable[torch.Tensor]) -> list[Any]:
        return [batch[..., 0].tolist() for batch in batches]

    loader = make(kind(), 4)
    whole = [numbers(loader) for _ in range(3)]  # plain torch
    part = Pass(make(kind(), 4), 1)
    batches = iter(part)
    begun = numbers([next(batches)])
    part.taken += 1
    next(batches)
    loader = make(kind(), 4)
    resumed = Pass(loader, 1, part.state_dict())
    assert [begun + numbers(resumed), numbers(Pass(loader, 2)), numbers(Pass(loader, 3))] == whole


def test_a_worker_that_is_not_next_has_its_state_tried_too() -> None:
    def loader() -> Any:
        return StatefulDataLoader(Buffered(), 4, num_workers=2)

    whole = [batch[:, 0].tolist() for batch in loader()]  # torchdata, uninterrupted
    part = Pass(loader(), 1)
    batches = iter(part)
    begun = [next(batches)[:, 0].tolist()]
    part.taken += 1
    next(batches)  # the first of the second worker, whose state is exact
    assert begun + [batch[:, 0].tolist() for batch in Pass(loader(), 1, part.state_dict())] == whole


class Large(Resumable):
    """A stream over an array, with what cannot be copied where it is asked for."""

    def __init__(self, file: Any = None) -> None:
        super().__init__()
        self.array, self.small, self.file, self.function = np.zeros(2**20), torch.zeros(1), file, lambda: None


def test_a_trial_shares_what_is_large_draws_nothing_and_takes_what_cannot_be_copied_at_its_word() -> None:
    stream, seen = Large(), []
    random.seed(3)
    expected = random.Random(3).random()

    def following(other: Large) -> float:
        seen.append(other)
        other.place, other.small[0] = 7, 1.0
        return random.random()

    assert not is_exact(stream, following, "")
    assert random.random() == expected
    assert (seen[0].array is stream.array, stream.place, stream.small.item()) == (True, 0, 0.0)
    with Path(__file__).open() as file:
        assert is_exact(Large(file), following, "")


@pytest.mark.parametrize("data", [list(range(LENGTH)), Resumable()], ids=["samples", "stream"])
def test_what_the_script_asks_of_torchdatas_loader_changes_no_pass(data: Any) -> None:
    from jobkit.data.foreign_loader import Pass

    loader = StatefulDataLoader(data, 4)
    whole = [batch.tolist() for batch in Pass(StatefulDataLoader(data, 4), 1)]
    loader.state_dict()
    assert [batch.tolist() for batch in Pass(loader, 1)] == whole
    other = StatefulDataLoader(data, 4)
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    if isinstance(data, Resumable):
        data.place = 0
    assert [batch.tolist() for batch in Pass(loader, 1)] == whole


@pytest.mark.parametrize("words", ["leave data= out of ctx.epochs", "ctx.loader's is for ctx.steps"])
def test_a_loader_that_is_tracked_is_refused(tmp_path: Path, words: str) -> None:
    ctx = make_context(tmp_path, RankGroup.alone())
    data: Any = StatefulDataLoader(range(8), 4) if "leave" in words else ctx.loader(range(8), global_batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        for _ in ctx.epochs(1, model=nn.Linear(1, 1), data=data):
            ctx.batches(data)
    ctx._tracked.close()


@pytest.mark.parametrize("of", ["the loader", "its sampler", "its sampler of batches"])
def test_a_generator_that_a_pass_seeds_and_the_script_tracks_is_refused(tmp_path: Path, of: str) -> None:
    ctx, generator, batches = make_context(tmp_path, RankGroup.alone()), torch.Generator(), Batched()
    batches.generator = generator
    options: dict[str, Any] = {"batch_sampler": batches}
    if of != "its sampler of batches":
        options = {"sampler": RandomSampler(Noisy(), generator=generator)}
    if of == "the loader":
        options = {"shuffle": True, "generator": generator}
    with pytest.raises(UsageError, match="noise is tracked too: give the loader a generator of its own"):
        for _ in ctx.epochs(1, model=nn.Linear(1, 1), noise=generator):
            ctx.batches(DataLoader(Noisy(), **options))
    ctx._tracked.close()


def weighted() -> DataLoader[Any]:
    return DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1] * LENGTH, LENGTH))


def of_samples(sampler: Any) -> DataLoader[Any]:
    return DataLoader(range(LENGTH), 4, sampler=sampler)  # type: ignore[arg-type]


def of_pairs() -> DataLoader[Any]:
    return DataLoader({(n, t): n for n in range(LENGTH) for t in "bc"}, batch_sampler=UnsavedBatches())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: of_samples(Unsaved()), "Unsaved"),
        (of_pairs, "UnsavedBatches"),
        (weighted, "WeightedRandomSampler"),
        (lambda: DataLoader(Noisy(), 4, shuffle=True), ""),
        (lambda: of_samples(OwnDraws()), ""),
    ],
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_pass_that_goes_on_in_another_order_says_so(
    heard: pytest.LogCaptureFixture, make: Callable[[], DataLoader[Any]], name: str, ahead: int
) -> None:
    loader = make()
    part = Pass(loader, 1)
    batches = iter(part)
    for _ in range(3):
        next(batches)
        part.taken += 1
    next(batches)
    state = part.state_dict(ahead)
    next(iter(Pass(make(), 1, state)))  # begun anew, a sampler draws the same
    old = {key: value for key, value in state.items() if key != "order"}
    next(iter(Pass(loader, 1, old)))  # a checkpoint of an older jobkit
    assert heard.messages == []
    if isinstance(loader.sampler, WeightedRandomSampler):
        loader.sampler.weights[3] = 9.0
    resumed = Pass(loader, 1, state)
    goes_on = iter(resumed)
    next(goes_on)
    assert [message.split()[:4] for message in heard.messages] == [[name, "has", "another", "order"]] * bool(name)
    resumed.taken += 1
    if not name:  # the digest of the whole order
        assert resumed.state_dict()["order"] == orders_of(make(), resumed.taken)


def orders_of(loader: DataLoader[Any], count: int) -> str:
    part = Pass(loader, 1)
    for _ in itertools.islice(part, count):
        part.taken += 1
    return part.state_dict()["order"]


@pytest.mark.parametrize("make", [lambda: Endless(Noisy(), 4, shuffle=True), Fast])
def test_a_loader_that_keeps_an_iterator_of_its_own_is_refused(make: Callable[[], Any]) -> None:
    loader = make()
    with pytest.raises(UsageError, match="persistent_workers=True"):
        for number in range(2):
            list(itertools.islice(Pass(loader, number), 3))


class Prepared:
    """As accelerate's: a DataLoader by its word alone, which iterates over the one within it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader

    @property
    def __class__(self) -> Any:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["base_dataloader"], name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)


def test_a_loader_around_a_dataloader_is_refused(tmp_path: Path) -> None:
    ctx = make_context(tmp_path, RankGroup.alone())
    with pytest.raises(UsageError, match="leave the loader out of prepare"):
        for _ in ctx.epochs(1, model=nn.Linear(1, 1)):
            ctx.batches(Prepared(DataLoader(range(8), 4, shuffle=True)))  # type: ignore[arg-type]
    ctx._tracked.close()


def sized(
    ranks: RankGroup, folder: Path, attempt: int, stop: int | None, size: int, length: int
) -> tuple[list[list[int]], list[tuple[Any, ...]]]:
    """Return the batches of an attempt, and what it warns of: what has changed, the old and the new value."""
    ctx = make_context(folder, ranks, attempt=attempt)
    seen: list[list[int]] = []
    records: list[Any] = []
    log.addFilter(lambda record: records.append(record) or True)
    try:
        for _ in ctx.epochs(1, model=nn.Linear(1, 1)):
            batches = ctx.batches(DataLoader(range(length), batch_size=size, shuffle=True))  # type: ignore[arg-type]
            assert len(batches) == -(-length // size)
            for batch in batches:
                seen.append(batch.tolist())
                if ctx.step == stop:
                    ctx._rank.page.ask_to_stop()
    except Stopped:
        pass
    ctx._tracked.close()
    return seen, [record.args[:3] for record in records if record.levelno == logging.WARNING]


def test_with_another_batch_size_an_epoch_has_each_sample_once(tmp_path: Path) -> None:
    plan = [(1, 4), (3, 5), (None, 3)]
    attempts = [run_ranks(sized, 1, tmp_path, n, stop, size, LENGTH)[0] for n, (stop, size) in enumerate(plan, 1)]
    batches = [batch for seen, _ in attempts for batch in seen]
    assert [len(batch) for batch in batches] == [4, 4, 5, 5, 3, 1]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(LENGTH))
    # No word of another order: another batch size has no place in the old one.
    assert [said for _, said in attempts] == [[], [("batch size", 4, 5)], [("batch size", 5, 3)]]


def test_another_length_of_the_dataset_is_said(tmp_path: Path) -> None:
    first, _ = run_ranks(sized, 1, tmp_path, 1, 2, 4, LENGTH)[0]
    second, said = run_ranks(sized, 1, tmp_path, 2, None, 4, 30)[0]
    assert (sum(map(len, first)), sum(map(len, second))) == (12, 18)
    assert said == [("number of samples", LENGTH, 30)]


# Streams of ctx.loader


def read(count: int, state: Any = None, **options: Any) -> tuple[list[list[list[float]]], Any]:
    """Return batches of a loader that goes on from a state, and its state after them."""
    loader = Loader(options.pop("dataset"), global_batch_size=8, seed=3, **options)
    if state is not None:
        loader.load_state_dict(state)
    return [next(loader).tolist() for _ in range(count)], loader.state_dict()


SHARDED = {
    "whole": Stream(),
    "4 shards": Stream(range(40), 4),
    "with a state": Resumable(range(40), 4),
    "with a buffer": Buffered(range(40), 4),
}


@pytest.mark.parametrize("name", SHARDED)
def test_a_stream_gives_the_same_samples_on_any_ranks_and_workers_and_after_a_restart(name: str) -> None:
    dataset = SHARDED[name]
    whole, _ = read(12, dataset=dataset)
    assert len({tuple(sample) for batch in whole for sample in batch}) == 96  # each with noise of its own
    states: list[Any] = [None, None]
    for begin, workers, world_size in ((0, 0, 2), (4, 2, 2), (8, 1, 4)):
        kept = states[0] if world_size != len(states) else None
        parts = [
            read(4, kept or states[rank], dataset=dataset, rank=rank, world_size=world_size, num_workers=workers)
            for rank in range(world_size)
        ]
        states = [state for _, state in parts]
        for number in range(4):
            together = sorted(sample for batches, _ in parts for sample in batches[number])
            assert together == sorted(whole[begin + number])


def test_ranks_divide_the_shards_and_a_state_is_not_read_again() -> None:
    dataset = Resumable(range(40), 4)
    loader = Loader(dataset, global_batch_size=8, rank=1, world_size=2, seed=3)
    assert loader.stream is not None
    parts: list[Any] = []
    make = loader.stream.part
    loader.stream.part = lambda number: parts.append((number, make(number))) or parts[-1][1]  # type: ignore[method-assign]
    _, state = read(30, dataset=dataset, rank=1, world_size=2)
    loader.load_state_dict(state)
    next(loader)
    assert [(number, part.read) for number, part in parts] == [(2, 0), (2, 3), (3, 3)]


class Mixed(IterableDataset[torch.Tensor]):
    """A stream that draws its order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.tensor(random.sample(range(40), 40)))


def test_a_stream_that_draws_its_order_has_it_again() -> None:
    whole, _ = read(8, dataset=Mixed())
    first, state = read(3, dataset=Mixed())
    random.seed(99)
    rest, _ = read(5, state, dataset=Mixed())
    assert first + rest == whole
    assert whole[:5] != whole[5:]


def test_a_stream_with_another_batch_size_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Resumable(range(40), 4)
    _, state = read(3, dataset=dataset)
    expected, loader = (Loader(dataset, global_batch_size=6, seed=3) for _ in range(2))
    expected.done = 24
    loader.load_state_dict(state)
    assert "number of parts" in caplog.text  # a state of other parts is not even tried
    assert torch.equal(next(loader), next(expected))


def read_apart(ranks: RankGroup) -> None:
    mine = Stream(range(ranks.rank, 40, ranks.world_size))
    with pytest.raises(UsageError, match="different samples"):
        next(Loader(mine, global_batch_size=8, rank=ranks.rank, world_size=2, gather=ranks.gather))


def test_a_stream_that_divides_itself_is_refused() -> None:
    run_ranks(read_apart, 2)


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream has the order": (Stream(), {"shuffle": True}),
    "no dataset": (iter([1]), {}),
    "ctx.batches it": (DataLoader(Noisy()), {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_stream_is_refused(words: str) -> None:
    dataset, options = REFUSED[words]
    with pytest.raises(UsageError, match=words):
        Loader(dataset, global_batch_size=4, **options)


@pytest.mark.parametrize(("size", "length", "position"), [(12, 37, 40), (8, 50, 53), (8, 20, 23)])
def test_a_loader_goes_on_after_the_samples_that_are_done(
    heard: pytest.LogCaptureFixture, size: int, length: int, position: int
) -> None:
    first = Loader(range(37), global_batch_size=8)  # type: ignore[arg-type]
    for _ in range(5):
        next(first)
    second = Loader(range(length), global_batch_size=size)  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    assert second.done == position
    assert ("global_batch_size" in heard.text) == (size != 8)
    rest = itertools.chain.from_iterable(next(second).tolist() for _ in range(6))
    if length == 37:  # no sample of the epoch under way is left out, none comes twice
        done = Loader(range(37), global_batch_size=40)  # type: ignore[arg-type]
        assert sorted([*next(done).tolist()[37:], *itertools.islice(rest, 34)]) == list(range(37))
