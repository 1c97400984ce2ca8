"""A loader that another attempt continues in a pass hands out the batches and random numbers of one without jobkit."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import pickle
import random
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import Team, on_ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.train import stream_draws
from jobkit.train.loader_pass import LoaderPass
from jobkit.train.own_state import own_state, set_own_state
from jobkit.train.tap import kept_draws

SAMPLES, BATCH, PASSES = 12, 2, 3


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise of every generator that users draw from, own ones included, one of them made late."""

    def __init__(self) -> None:
        self.own, self.late = np.random.default_rng(7), None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.late: Any = self.late or random.Random(3)
        drawn = (random.random(), np.random.rand(), torch.rand(()).item(), self.own.random(), self.late.random())
        return torch.tensor((index, *drawn), dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream, shuffled by a buffer and Python's generator."""

    def __init__(self) -> None:
        self.samples = Augmented()

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        buffer: list[int] = []
        for number in range(worker.id if worker else 0, SAMPLES, worker.num_workers if worker else 1):
            buffer.append(number)
            if len(buffer) == 4:
                yield self.samples[buffer.pop(random.randrange(4))]
        yield from (self.samples[number] for number in buffer)


class Lazy(torch.utils.data.Sampler[int]):
    """Draws each number when it is asked for it, from the process's generator, and counts."""

    def __init__(self) -> None:
        self.drawn, self.passes = 0, 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            self.drawn += 1
            yield (random.randrange(SAMPLES) + self.drawn) % SAMPLES
        self.passes += 1

    def __len__(self) -> int:
        return SAMPLES


class InPlace(torch.utils.data.Sampler[int]):
    """Shuffles its own order once more in each pass."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return SAMPLES


class InPlaceArray(InPlace):
    def __init__(self) -> None:
        self.order: Any = np.arange(SAMPLES)


class InPlaceBatches(InPlace):
    def __init__(self) -> None:
        self.order: Any = [[one, one + 1] for one in range(0, SAMPLES, 2)]

    def __len__(self) -> int:
        return len(self.order)


class InPlaceStream(IterableDataset[torch.Tensor]):
    """Shuffles its shards in place, and counts its passes."""

    def __init__(self) -> None:
        self.shards = deque([str(one), one] for one in range(SAMPLES))
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        random.shuffle(self.shards)
        self.passes += 1
        for name, shard in self.shards:
            yield torch.tensor((float(name), shard, self.passes, random.random()), dtype=torch.float64)


class Ahead(DataLoader[Any]):
    """Is one batch ahead of what it hands out, as Accelerate's loaders are."""

    def __iter__(self) -> Any:
        held = []
        for batch in super().__iter__():
            held.append(batch)
            if len(held) == 2:
                yield held.pop(0)
        yield from held


def seed(number: int) -> None:
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


class Attempt:
    """A training that draws random numbers between two batches; without jobkit, or with it."""

    def __init__(self, kind: type[Any], loader: type[Any], options: dict[str, Any]) -> None:
        own: Any = kind()
        self.loader: Any
        if isinstance(own, InPlaceBatches):
            self.loader = loader(Augmented(), batch_sampler=own, **options)
        elif isinstance(own, torch.utils.data.Sampler):
            self.loader = loader(Augmented(), batch_size=BATCH, sampler=own, **options)
        else:
            shuffle = {} if isinstance(own, IterableDataset) else {"shuffle": True}
            self.loader = loader(own, batch_size=BATCH, **shuffle, **options)
        self.seen: list[Any] = []

    def _learn(self, number: int, batch: torch.Tensor) -> None:
        self.seen.append((number, batch.tolist(), (random.random(), np.random.rand(), torch.rand(()).item())))

    def plain(self) -> list[Any]:
        for number in range(PASSES):
            for batch in self.loader:
                self._learn(number, batch)
        return self.seen

    def run(self, saved: Any, stop: tuple[int, int] | None) -> Any:
        """From a checkpoint to the end or to (pass, batch); the checkpoint there."""
        number, state, draws, own, generators = saved or (0, None, None, None, None)
        if own is not None and state is None:
            set_own_state(self.loader, own)
        if generators is not None:
            set_rng_state(generators)
        for one in range(number, PASSES):
            if stop == (one, 0):
                return self._checkpoint(one, None, kept_draws(self.loader))
            batches = LoaderPass(self.loader, state, draws=draws)
            state = draws = None
            for batch in batches:
                self._learn(one, batch)
                if stop == (one, batches.taken):
                    return self._checkpoint(one, batches.state(), None)
        return None

    def _checkpoint(self, number: int, state: Any, draws: Any) -> Any:
        return pickle.loads(pickle.dumps((number, state, draws, own_state(self.loader), rng_state())))


CASES = {
    "map": (Augmented, DataLoader, {}),
    "map, ahead": (Augmented, Ahead, {}),
    "workers": (Augmented, DataLoader, {"num_workers": 2}),
    "workers, ahead": (Augmented, Ahead, {"num_workers": 2}),
    "kept workers": (Augmented, DataLoader, {"num_workers": 2, "persistent_workers": True}),
    "a sampler that draws when it is asked": (Lazy, DataLoader, {"num_workers": 2}),
    "stream": (Stream, DataLoader, {}),
    "stream, ahead": (Stream, Ahead, {}),
    "stream, kept workers": (Stream, DataLoader, {"num_workers": 2, "persistent_workers": True}),
}


def continued(team: Team, case: str) -> None:
    kind, loader, options = CASES[case]
    seed(1)
    plain = Attempt(kind, loader, options).plain()
    for stop in ((0, 1), (1, 0), (2, 4)):
        seed(1)
        first = Attempt(kind, loader, options)
        saved = first.run(None, stop)
        later = (stop[0], stop[1] + 1)  # what was continued is continued again
        seed(2)
        second = Attempt(kind, loader, options)
        saved = second.run(saved, later)
        seed(3)
        third = Attempt(kind, loader, options)
        third.run(saved, None)
        assert first.seen + second.seen + third.seen == plain, stop


@pytest.mark.parametrize("case", CASES)
def test_a_pass_goes_on_with_the_batches_and_random_numbers_of_a_plain_loop(case: str) -> None:
    on_ranks(1, continued, case)


def left_early(team: Team) -> None:
    """Kept workers have drawn for batches that nobody took, and for the script's own passes."""
    found = []
    for stops in (False, True):
        seed(1)
        attempt = Attempt(Augmented, DataLoader, {"num_workers": 2, "persistent_workers": True})
        list(attempt.loader)  # not told of, but by the workers
        next(LoaderPass(attempt.loader))
        list(attempt.loader)
        draws, state = kept_draws(attempt.loader) if stops else None, copy.deepcopy(rng_state())
        if stops:
            seed(2)
            attempt = Attempt(Augmented, DataLoader, {"num_workers": 2, "persistent_workers": True})
            set_rng_state(state)
        found.append([batch.tolist() for batch in LoaderPass(attempt.loader, draws=draws)])
    assert found[0] == found[1]


def test_kept_workers_of_a_pass_that_was_left_early_go_on() -> None:
    on_ranks(1, left_early)


def own_from_the_second(team: Team) -> None:
    stream_draws.MOST = 1
    seed(1)
    whole = Attempt(Stream, DataLoader, {})
    whole.run(None, None)
    for stop in (1, 2, 4):
        seed(1)
        first = Attempt(Stream, DataLoader, {})
        saved = first.run(None, (1, stop))
        second = Attempt(Stream, DataLoader, {})
        second.run(saved, None)
        assert first.seen + second.seen == whole.seen, stop


def test_a_stream_of_many_batches_draws_from_generators_of_its_own() -> None:
    on_ranks(1, own_from_the_second)


def freed(team: Team) -> None:
    gc.disable()
    for kind in (Augmented, Stream):
        batches = LoaderPass(Ahead(kind(), batch_size=BATCH, num_workers=1))
        next(batches)
        tap = weakref.ref(batches._tap)
        del batches
        assert tap() is None


def test_the_workers_of_a_pass_end_with_it() -> None:
    on_ranks(1, freed)


class Noise:
    """A transform with a generator, of its own or given."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, value: float) -> float:
        return value + float(self.generator.random())


class FirstUse(Dataset[torch.Tensor]):
    """Makes its generators as the first sample is asked for, one by the number of the worker."""

    def __init__(self) -> None:
        self.by_worker: dict[int, Any] = {}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = torch.utils.data.get_worker_info()
        if not hasattr(self, "generator"):
            self.generator = np.random.default_rng(worker.seed if worker else 3)
        own = self.by_worker.setdefault(worker.id if worker else 0, random.Random(2))
        return torch.tensor((index, self.generator.random(), own.random()), dtype=torch.float64)


class Deep(Dataset[torch.Tensor]):
    """Its generators are in a list of transforms, in a partial's arguments and in a function's closure."""

    def __init__(self) -> None:
        given = random.Random(4)

        def noisy(value: float) -> float:
            return value + given.random()

        noises = [noisy, functools.partial(added, generator=random.Random(5)), Noise(np.random.default_rng(6)).__call__]
        self.transform = {"train": [Noise(random.Random(3)), *noises]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([one(float(index)) for one in self.transform["train"]], dtype=torch.float64)


def added(value: float, generator: random.Random) -> float:
    return value + generator.random()


class DeepInParts(Dataset[torch.Tensor]):
    """The same in a part of joined datasets."""

    def __init__(self) -> None:
        joined = torch.utils.data.ConcatDataset([Deep()])
        self.parts = torch.utils.data.Subset(torch.utils.data.Subset(joined, range(SAMPLES)), range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.parts[index]


def continued_of(team: Team, kind: type[Any], options: dict[str, Any]) -> None:
    CASES["own"] = (kind, DataLoader, options)
    continued(team, "own")


@pytest.mark.parametrize("kind", [FirstUse, Deep, DeepInParts], ids=lambda one: one.__name__)
@pytest.mark.parametrize("workers", [0, 2])
def test_generators_wherever_a_dataset_keeps_them_go_on(kind: type[Any], workers: int) -> None:
    on_ranks(1, continued_of, kind, {"num_workers": workers})


@pytest.mark.parametrize("kind", [InPlace, InPlaceArray, InPlaceBatches, InPlaceStream], ids=lambda one: one.__name__)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_an_order_that_is_shuffled_in_place_goes_on(kind: type[Any], options: dict[str, Any]) -> None:
    on_ranks(1, continued_of, kind, options)


def buffered(team: Team) -> None:
    """A Hugging Face stream's own state does not hold what is in its shuffle buffer."""
    import datasets

    def batches(state: Any = None) -> LoaderPass:
        stream = datasets.IterableDataset.from_generator(lambda: ({"x": one} for one in range(SAMPLES)))
        return LoaderPass(stream.shuffle(seed=3, buffer_size=5).batch(BATCH), state)

    whole = [batch["x"] for batch in batches()]
    assert sorted(one for batch in whole for one in batch) == list(range(SAMPLES))
    for stop in (1, 4):
        first = batches()
        seen = [next(first)["x"] for _ in range(stop)]
        assert seen + [batch["x"] for batch in batches(pickle.loads(pickle.dumps(first.state())))] == whole


def test_a_hugging_face_stream_with_a_buffer_gives_each_sample_once() -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    on_ranks(1, buffered)


@dataclass(frozen=True)
class Frozen(torch.utils.data.Sampler[int]):
    samples: int = SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.samples).tolist())

    def __len__(self) -> int:
        return self.samples


class OnNode(IterableDataset[int]):
    """Reads what is on the node's own disk."""

    def __init__(self, folder: str) -> None:
        self.folder, self.read = folder, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OfOddTypes(Dataset[Any]):
    def __init__(self) -> None:
        self.small, self.complex = torch.zeros(4).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.cfloat).conj()
        self.gone = weakref.proxy(OnNode(""))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.small[index].float()


def test_the_state_of_what_cannot_be_set_is_left_alone() -> None:
    loader = DataLoader(Augmented(), sampler=Frozen())
    set_own_state(loader, own_state(loader))


def test_a_folder_is_that_of_this_attempt() -> None:
    before = OnNode("/tmp/job-1")
    before.read = 5
    now = OnNode("/tmp/job-2")
    set_own_state(DataLoader(now), own_state(DataLoader(before)))
    assert (now.folder, now.read) == ("/tmp/job-2", 5)


def test_tensors_of_types_that_numpy_has_not_are_no_order() -> None:
    assert "dataset.small" not in own_state(DataLoader(OfOddTypes()))
