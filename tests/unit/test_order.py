"""The order of samples: every one once an epoch, without a visible structure, and drawn in proportion to weights."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from jobkit.errors import JobkitError, UsageError
from jobkit.train.order import SMALL, SampleOrder, feistel, permuted

LARGE = 100_003
"""More than SMALL, for which the network is used, and a prime."""


def numbers(length: int) -> NDArray[np.uint64]:
    return np.arange(length, dtype=np.uint64)


def epoch(length: int, seed: int) -> NDArray[np.int64]:
    return permuted(numbers(length), length, seed).astype(np.int64)


def surprise(counts: NDArray[np.float64]) -> float:
    """How many standard deviations the chi-square of counts that should be equal is above what chance gives."""
    expected, freedom = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def pairs(left: NDArray[np.int64], right: NDArray[np.int64], length: int) -> NDArray[np.float64]:
    """How often a number of each 32nd of the range stands beside one of each other 32nd."""
    counts = np.zeros((32, 32))
    np.add.at(counts, (left * 32 // length, right * 32 // length), 1)
    return counts


def test_the_network_gives_each_number_once_whatever_the_length() -> None:
    lengths = [*range(1, 400), *(n + d for n in (2**10, 3**7, 2**16, 255**2) for d in (-1, 0, 1)), LARGE]
    for length in lengths:
        for seed in range(3 if length < 400 else 1):
            found = np.bincount(feistel(numbers(length), length, seed).astype(np.int64), minlength=length)
            assert len(found) == length and (found == 1).all(), (length, seed)


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_an_order_looks_random(length: int) -> None:
    places, orders = np.arange(length), [epoch(length, seed) for seed in range(6)]
    side = math.isqrt(length - 1) + 1
    relations = {
        "a place and what is there": [(places, order) for order in orders],
        "neighbours": [(order[:-1], order[1:]) for order in orders],
        "places a row of the network apart": [(order[:-side], order[side:]) for order in orders],
        "a place in two epochs": itertools.pairwise(orders),
    }
    for relation, sides in relations.items():
        counts = sum((pairs(left, right, length) for left, right in sides), np.zeros((32, 32)))
        assert surprise(counts) < 4, relation
    steps = np.concatenate([np.diff(order) % length for order in orders])
    assert surprise(np.bincount(steps * 1024 // length, minlength=1024).astype(float)) < 4


def test_of_a_few_samples_each_order_is_as_likely() -> None:
    found = [tuple(epoch(4, seed)) for seed in range(2400)]
    counts = np.array([found.count(order) for order in itertools.permutations(range(4))], dtype=float)
    assert surprise(counts) < 4


def test_an_order_is_the_same_on_every_machine() -> None:
    assert permuted(numbers(10), 10, 1).tolist() == [1, 4, 2, 7, 9, 3, 0, 6, 8, 5]
    # Other values would change every resumed run.
    assert permuted(numbers(4), 10**9, 1).tolist() == [678905545, 119865469, 823192971, 620337545]


def test_an_order_of_a_billion_samples_takes_no_memory_and_no_time_to_begin() -> None:
    tracemalloc.start()
    order = SampleOrder(10**9, 512, seed=0)
    share = order.share(10**6, rank=1, world_size=4)
    assert len({sample for _, sample in share}) == 128
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


# Weights


def drawn(order: SampleOrder, batches: int) -> list[int]:
    return [sample for number in range(batches) for _, sample in order.batch(number)]


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = [1.0, 0.0, 3.0, 0.5, 0.0, 5.5]
    counts = np.bincount(drawn(SampleOrder(6, 1000, 0, weights=weights), 20), minlength=6)
    assert counts[1] == counts[4] == 0
    assert np.allclose(counts / 2000, weights, atol=0.15)


def test_a_draw_depends_on_its_position_alone_and_each_has_random_numbers_of_its_own() -> None:
    order = SampleOrder(6, 8, seed=0, weights=torch.arange(6.0))
    batches = [order.batch(number) for number in range(10)]
    assert [order.batch(number) for number in reversed(range(10))] == batches[::-1]
    assert [[*itertools.chain(*(order.share(number, rank, 3) for rank in range(3)))] for number in range(10)] == batches
    keys = list(itertools.chain.from_iterable(batches))
    assert len(set(keys)) == len(keys), "what augments a sample that is drawn twice would be the same"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 5, r"has the shape \[5\]: expected one for each of 6"),
        ([0.0] * 6, "not all 0"),
        ([1.0] * 5 + [-1.0], "not negative"),
        ([1.0] * 5 + [math.nan], "finite"),
        (["many"] * 6, "must be numbers"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(JobkitError, match=message):
        SampleOrder(6, 4, seed=0, weights=weights)


def test_samples_that_are_left_out_are_replaced_by_the_next_ones_on_any_number_of_ranks() -> None:
    plain, order = SampleOrder(10, 4, seed=1), SampleOrder(10, 4, seed=1, skipped=[9, 3, 4])
    instead = {3: 5, 4: 5, 9: 0}
    for number in range(6):
        expected = [(epoch, instead.get(sample, sample)) for epoch, sample in plain.batch(number)]
        assert order.batch(number) == expected
        assert [pair for rank in range(3) for pair in order.share(number, rank, 3)] == expected
    with pytest.raises(UsageError, match="sample 10 is to be left out, and the dataset has 10"):
        order.skip([10])
    with pytest.raises(UsageError, match="all samples"):
        order.skip(range(10))
