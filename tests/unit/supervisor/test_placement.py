"""Which nodes of a job have the ranks: tables of names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from jobkit.config.schema import Config, ParallelConfig, Resources
from jobkit.supervisor.placement import Placement, nodes_to_use


def config(nodes: int, ranks: int = 1, *, min_nodes: str | int = "all", **parallel: Any) -> Config:
    resources = Resources(nodes=nodes, tasks_per_node=ranks, min_nodes=min_nodes)
    return Config(name="toy", task="m:f", resources=resources, parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("wanted", "usable", "expected"),
    [
        (config(2), 3, 2),
        (config(2), 1, 0),
        (config(4, min_nodes=2), 3, 3),
        (config(4, min_nodes=2), 1, 0),
        (config(4, 2, min_nodes=1, tensor=4), 3, 2),  # 6 ranks are no whole groups of 4
        (config(4, 2, min_nodes=1, tensor="all"), 3, 3),
        (config(4, 2, min_nodes=1, tensor=2, pipeline=2), 3, 2),
        (config(4, 1, min_nodes=1, data="hsdp", shards=2), 3, 2),
    ],
)
def test_ranks_start_on_as_many_nodes_as_the_yaml_allows(wanted: Config, usable: int, expected: int) -> None:
    assert nodes_to_use(wanted, usable) == expected


def placement(lost: Collection[str] = (), excluded: Collection[str] = (), fewest: int = 2) -> Placement:
    """Four nodes, two of them for the ranks."""
    return Placement(
        ["n1", "n2", "n3", "n4"],
        lost,
        excluded,
        lambda usable: min(usable, 2) if usable >= fewest else 0,
    )


CHOICES: list[tuple[str, Placement, Sequence[str], Collection[str], list[str]]] = [
    ("at the beginning", placement(), (), (), ["n1", "n2"]),
    ("at the beginning, one node is excluded", placement(excluded={"n1"}), (), (), ["n2", "n3"]),
    ("again", placement(), ("n2", "n3"), (), ["n2", "n3"]),
    ("a spare takes a place", placement(lost={"n1"}), ("n1", "n2"), (), ["n3", "n2"]),
    ("a spare that is ready goes first", placement(lost={"n1"}), ("n1", "n2"), ("n4",), ["n4", "n2"]),
    ("a given-up node is replaced", placement(excluded={"n2"}), ("n1", "n2"), (), ["n1", "n3"]),
    ("fewer nodes", placement(lost={"n1", "n3", "n4"}, fewest=1), ("n1", "n2"), (), ["n2"]),
    ("too few", placement(lost={"n1", "n3", "n4"}), ("n1", "n2"), (), []),
    ("an excluded node rather than none", placement({"n3", "n4"}, {"n1"}), ("n1", "n2"), (), ["n1", "n2"]),
]


@pytest.mark.parametrize(
    ("where", "used", "ready", "expected"), [row[1:] for row in CHOICES], ids=[row[0] for row in CHOICES]
)
def test_ranks_stay_where_they_are_and_spares_fill_the_gaps(
    where: Placement, used: Sequence[str], ready: Collection[str], expected: list[str]
) -> None:
    assert where.choose(used, 2, ready) == expected


def test_a_job_can_start_again_without_nodes_only_if_enough_others_are_good() -> None:
    assert placement(lost={"n1"}).can_start_again({"n2"})
    assert not placement(lost={"n1"}, excluded={"n3"}).can_start_again({"n2"})
    assert placement(lost={"n1", "n2"}, excluded={"n3"}).can_start_again(), "an excluded node rather than none"
