"""The agreement between two steps, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from jobkit.loop.agreement import MAX_STEPS, Decision, Wish, decide


def agree(*wishes: dict[str, Any]) -> Decision:
    vectors = [Wish(**{"ordinal": 5, "step_seconds": 0.1, **wish}).vector() for wish in wishes]
    return decide([max(column) for column in zip(*vectors, strict=True)])


TABLE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "nothing": ([{}, {}], {"stop": False, "disk": False, "memory": False, "bad": False, "apart": None}),
    "a stop of any rank": ([{}, {"stop": True}], {"stop": True}),
    "a save of any rank": ([{"disk": True}, {}], {"disk": True}),
    "a checkpoint makes a snapshot needless": ([{"disk": True, "memory": True}], {"disk": True, "memory": False}),
    "a stop does too": ([{"stop": True, "memory": True}], {"memory": False}),
    "a bad loss wins over a save": ([{"bad": True}, {"disk": True, "memory": True}], {"bad": True, "disk": False}),
    "a bad loss wins over a stop": ([{"bad": True}, {"stop": True}], {"bad": True, "stop": False}),
    "ranks that are apart": ([{"ordinal": 4}, {"ordinal": 7}], {"apart": (4, 7)}),
    "the slowest rank's steps": ([{"step_seconds": 0.05}, {"step_seconds": 0.01}], {"steps_to_next": 5}),
    "very quick steps": ([{"step_seconds": 0.0}], {"steps_to_next": MAX_STEPS}),
    "very slow steps": ([{"step_seconds": 100.0}], {"steps_to_next": 1}),
    "the least complete snapshot": ([{"complete": 4}, {"complete": 3}], {"least_complete": 3}),
    "no complete snapshot": ([{"complete": 0}, {"complete": 2}], {"least_complete": 0}),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_decision(name: str) -> None:
    wishes, expected = TABLE[name]
    decision = agree(*wishes)
    assert {key: getattr(decision, key) for key in expected} == expected
