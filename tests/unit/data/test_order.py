"""The data's order is a function of a position: the same on any number of ranks, and after any restart."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from jobkit.data.foreign_loader import Pass, length_of
from jobkit.data.loader import Loader
from jobkit.data.order import feistel, permuted
from jobkit.data.seeds import generator_state, load_generator_state, preserved_generators, seed_generators
from jobkit.data.workers import fork_workers
from jobkit.errors import UsageError
from jobkit.loop.evaluate import Batches
from jobkit.loop.tracked import Generators


class Noisy(Dataset[Tensor]):
    """Samples with noise from all three generators."""

    def __init__(self, length: int = 37) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


# Order


@pytest.mark.parametrize("length", [1, 2, 5, 100, 70_000])
def test_an_epoch_has_each_sample_once(length: int) -> None:
    order = permuted(np.arange(length, dtype=np.uint64), length, 3)
    assert sorted(order.tolist()) == list(range(length))


def test_a_network_of_any_size_is_a_permutation() -> None:
    for length in (2, 3, 1000, 1023):
        assert sorted(feistel(np.arange(length, dtype=np.uint64), length, 1).tolist()) == list(range(length))


# The own loader


@pytest.mark.parametrize(
    ("dataset", "workers"), [(Noisy(), 0), (Noisy(), 2), (Subset(Noisy(), range(37)), 0)], ids=["0", "2", "subset"]
)
def test_samples_and_their_noise_are_equal_on_any_ranks_and_workers(dataset: Dataset[Tensor], workers: int) -> None:
    whole = Loader(dataset, global_batch_size=8)
    parts = [Loader(dataset, global_batch_size=8, rank=rank, world_size=3, num_workers=workers) for rank in range(3)]
    for _ in range(6):
        expected = next(whole)
        assert torch.equal(torch.cat([next(part) for part in parts]), expected)
        assert whole.sample_ids == expected[:, 0].int().tolist()


def test_a_loader_goes_on_at_its_position_and_leaves_the_generators_alone() -> None:
    first, second = Loader(Noisy(), global_batch_size=8), Loader(Noisy(), global_batch_size=8)
    for _ in range(5):
        next(first)
    second.load_state_dict(first.state_dict())
    seed_generators(7)
    expected = draws()
    seed_generators(7)
    assert torch.equal(next(first), next(second))
    assert draws() == expected


REFUSED: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": 4},
    "shuffel": {"shuffel": True},
    "divide a stream": {"sharded": True},  # of the second edition
    "read again": {"own_state": False},
    "weights": {"weights": [1.0], "shuffle": True},
    "global_batch_size": {"global_batch_size": 0},
    "leaves some": {"global_batch_size": 2, "world_size": 3},
}


@pytest.mark.parametrize("word", REFUSED)
def test_options_that_do_not_fit_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Loader(Noisy(), **{"global_batch_size": 8, **REFUSED[word]})


# Foreign loaders


def noisy_collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.rand(())


def shuffled() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=noisy_collate)


def test_a_pass_leaves_the_trainings_generators_alone() -> None:
    seed_generators(5)
    expected = draws()
    seed_generators(5)
    for _ in Pass(shuffled(), 17):
        pass
    assert draws() == expected


def test_two_passes_differ_and_samples_of_a_batch_do_too() -> None:
    loader = shuffled()
    first, second = torch.cat(list(Pass(loader, 1))), torch.cat(list(Pass(loader, 2)))
    assert not torch.equal(first, second)
    assert len(set(first[:, 1].tolist())) == 37


def test_a_pass_knows_the_ids_of_its_samples() -> None:
    part = Pass(shuffled(), 1)
    for number, batch in enumerate(part):
        assert part.ids(number) == batch[:, 0].int().tolist()


@pytest.mark.parametrize(("length", "sends"), [(75, True), (76, False), (120, False)])
def test_a_temporary_folder_too_long_for_sockets_is_refused_where_workers_are_used(
    monkeypatch: pytest.MonkeyPatch, length: int, sends: bool
) -> None:
    """A worker that cannot bind its socket sends no tensor, and dies of nothing: the rank waits for ever."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(f"{base}/".ljust(length, "x"))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
        if not sends:  # Python makes it at the first call, and removes it at its exit
            monkeypatch.setattr(util, "get_temp_dir", lambda: f"{folder}/pymp-12345678")
        loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1)
        if sends:
            assert len(list(fork_workers(loader))) == 4
        else:
            with pytest.raises(UsageError, match=f"TMPDIR={folder}: {length - 75} byte"):
                fork_workers(loader)
        assert fork_workers(DataLoader(TensorDataset(torch.arange(4)))).num_workers == 0


def test_workers_are_forked_unless_the_script_has_chosen() -> None:
    methods = []
    for options in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}):
        context = fork_workers(DataLoader(range(4), **options)).multiprocessing_context
        methods.append(context and context.get_start_method())
    assert methods == [None, "fork", "spawn"]


# Generators


def test_generators_come_back() -> None:
    seed_generators(3)
    state = generator_state()
    expected = draws()
    draws()
    load_generator_state(state)
    assert draws() == expected
    load_generator_state(state)
    with preserved_generators():
        draws()
    assert draws() == expected


class Endless(Sampler[int]):
    """A sampler without a length, which torch allows."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Guessed(IterableDataset[int]):
    """A stream with a length, which torch takes for a guess."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 9


def test_on_another_number_of_ranks_each_rank_draws_its_own_numbers() -> None:
    before, drawn = Generators(0, 0, 2, ()).state_dict(), [draws()]
    for rank in range(3):
        Generators(0, rank, 3, ()).load_state_dict(before)
        drawn.append(draws())
    assert len(set(drawn)) == 4


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (DataLoader(range(6), batch_size=2), 3),  # type: ignore[arg-type]
        (DataLoader(range(6), sampler=Endless()), None),  # type: ignore[arg-type]
        (DataLoader(Guessed()), None),
        (iter([1]), None),
    ],
)
def test_the_length_of_a_loader_is_known_or_not(loader: Any, length: int | None) -> None:
    assert length_of(loader) == length


def test_the_half_of_a_pair_of_normal_numbers_comes_back() -> None:
    seed_generators(3)
    np.random.randn()
    state = generator_state()
    expected = np.random.randn(3).tolist()
    load_generator_state(state)
    assert np.random.randn(3).tolist() == expected


def test_each_epoch_has_noise_of_its_own() -> None:
    loader = Loader(Noisy(), global_batch_size=37, shuffle=False)
    first, second = next(loader), next(loader)
    assert torch.equal(first[:, 0], second[:, 0])
    assert not set(first[:, 3].tolist()) & set(second[:, 3].tolist())


def test_noise_in_an_evaluation_belongs_to_its_sample() -> None:
    (_, fives), (_, fours) = Batches(Noisy(), 5, 3, None)[1], Batches(Noisy(), 4, 3, None)[1]
    assert torch.equal(fives[0], fours[1])  # sample 5
    assert len(set(fives[:, 1].tolist())) == 5


def test_a_long_epoch_has_each_sample_once() -> None:
    loader = Loader(range(1000), global_batch_size=8)  # type: ignore[arg-type]
    assert sorted(sample for _ in range(125) for sample in next(loader).tolist()) == list(range(1000))


def test_a_loader_that_was_read_before_its_restore_goes_on_from_the_checkpoint() -> None:
    first, second = (Loader(range(100), global_batch_size=8) for _ in range(2))  # type: ignore[arg-type]
    for _ in range(5):
        next(first)
    next(second)
    second.load_state_dict(first.state_dict())
    assert torch.equal(next(first), next(second))


def test_a_pass_that_goes_on_has_the_rest_of_its_batches() -> None:
    loader = DataLoader(range(24), batch_size=4)  # type: ignore[arg-type]
    assert Pass(loader, 1, {"taken": 2, "skipped": 0, "sampler": None, "stream": None}).batches_left() == 4


class Told(Sampler[int]):
    """A sampler that the loop tells what comes next."""

    place = 0

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            yield self.place


def test_a_sampler_that_looks_at_the_loop_is_not_read_ahead() -> None:
    sampler, seen = Told(), []
    for number, batch in enumerate(Pass(DataLoader(range(10), batch_size=1, sampler=sampler), 1)):  # type: ignore[arg-type]
        seen += batch.tolist()
        sampler.place = number + 1
    assert seen == [0, 1, 2, 3, 4, 5]
