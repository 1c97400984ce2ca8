"""The pairs of nodes that the network probe measures, and the nodes that it calls slow."""

from __future__ import annotations

import pytest

from jobkit.worker.network_probe import bus, rounds, slow_nodes


@pytest.mark.parametrize("nodes", [3, 4, 7])
def test_each_node_meets_both_neighbours_and_nobody_twice_at_once(nodes: int) -> None:
    met: dict[int, int] = {}
    for pairs in rounds(nodes):
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
        for node in members:
            met[node] = met.get(node, 0) + 1
    assert met == dict.fromkeys(range(nodes), 2)


def test_two_nodes_cannot_be_told_apart() -> None:
    assert rounds(2) == []


def test_a_node_that_is_slow_to_both_neighbours_is_named() -> None:
    assert slow_nodes({"a": 10.0, "b": 9.0, "c": 4.0, "d": 11.0}) == ["c"]
    assert slow_nodes({}) == []


def test_the_bandwidth_of_a_link_does_not_depend_on_the_ranks() -> None:
    assert bus(1000, 1.0, 2) == 1000
    assert bus(1000, 1.5, 4) == 1000
