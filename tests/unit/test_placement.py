"""Which of a job's nodes have the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from jobkit.run.config import Config, ParallelConfig, Resources
from jobkit.supervisor.placement import Placement, nodes_to_use


def placement(names: str, lost: str = "", excluded: str = "", nodes: int = 2, fewest: int = 0) -> Placement:
    resources = Resources(nodes=nodes, min_nodes=fewest or "all")
    config = Config(name="toy", task="mytask:train", resources=resources)
    return Placement(list(names), set(lost), set(excluded), partial(nodes_to_use, config))


CHOICES = [
    ("the first ones, at the beginning", placement("abcd"), "", "", "ab"),
    ("those of the last attempt", placement("abcd"), "bd", "", "bd"),
    ("a spare in the place of a lost one", placement("abcd", lost="a"), "ab", "", "cb"),
    ("a spare that is ready before one that is not", placement("abcd", lost="a"), "ab", "d", "db"),
    ("a spare in the place of an excluded one", placement("abc", excluded="b"), "ab", "", "ac"),
    ("an excluded one, where the others are too few", placement("abc", lost="c", excluded="b"), "ac", "", "ab"),
    ("none, where too few are left", placement("abc", lost="bc"), "ab", "", ""),
    ("fewer, where the run can do with them", placement("ab", lost="a", fewest=1), "ab", "", "b"),
]


@pytest.mark.parametrize(
    ("nodes", "used", "ready", "chosen"), [row[1:] for row in CHOICES], ids=[row[0] for row in CHOICES]
)
def test_the_nodes_of_an_attempt(nodes: Placement, used: Sequence[str], ready: str, chosen: str) -> None:
    assert nodes.choose(list(used), 2, ready) == list(chosen)


def test_whether_it_can_start_again_beside_some_nodes() -> None:
    nodes = placement("abc", excluded="c")
    assert nodes.can_start_again()
    assert not nodes.can_start_again(["a"])
    assert placement("ab", excluded="b").can_start_again()  # with the excluded one, if nobody asks for others
    assert not placement("ab", excluded="b").can_start_again(["b"])
    assert not placement("ab", lost="b").can_start_again()


def test_only_numbers_of_nodes_that_the_model_can_be_divided_over_count() -> None:
    resources = Resources(nodes=4, min_nodes=1)
    config = Config(name="toy", task="mytask:train", resources=resources, parallel=ParallelConfig(pipeline=2))
    assert [nodes_to_use(config, usable) for usable in (5, 4, 3, 2, 1)] == [4, 4, 2, 2, 0]
