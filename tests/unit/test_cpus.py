"""Ranks that one parent has forked divide the CPUs that Slurm has given it."""

from __future__ import annotations

import pytest

from jobkit.worker.cpus import share_of

# Two sockets of four cores with two threads each, numbered as Linux does: threads 8 to 15 are second ones.
PLACES = {cpu: (cpu % 8 // 4, cpu % 4, cpu) for cpu in range(16)}


@pytest.mark.parametrize(
    ("allowed", "ranks", "shares"),
    [
        ([0, 1, 2, 3, 8, 9, 10, 11], 2, [[0, 8, 1, 9], [2, 10, 3, 11]]),
        ([0, 4, 8, 12], 2, [[0, 8], [4, 12]]),
        ([0, 1, 2], 2, [[0], [1]]),
        ([0, 1], 2, [[0], [1]]),
        ([0], 2, [[], []]),
        (list(range(16)), 2, [[], []]),
    ],
    ids=["cores", "sockets", "one too many", "one each", "too few", "not bound"],
)
def test_each_rank_gets_whole_cores_beside_each_other(allowed: list[int], ranks: int, shares: list[list[int]]) -> None:
    assert [share_of(allowed, 16, rank, ranks, PLACES.__getitem__) for rank in range(ranks)] == shares
