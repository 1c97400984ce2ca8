"""What is read of the frame of a script whose loop jobkit drives."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from jobkit.worker.caller import CallerLoop, local_variables


def test_looking_at_variables_keeps_none_of_them_alive() -> None:
    outputs = torch.zeros(3)
    alive = weakref.ref(outputs)
    assert "outputs" in _variables_here()
    outputs = torch.ones(1)
    assert alive() is None, outputs


def test_what_the_function_has_read_itself_stays() -> None:
    rate = 0.1
    own = locals()
    assert _variables_here()["rate"] == rate
    assert own["rate"] == rate


def _variables_here() -> dict[str, Any]:
    return local_variables(sys._getframe(1))


def batches(*_: Any) -> Iterator[CallerLoop]:
    """The loop that goes over this, as it is known."""
    yield CallerLoop(sys._getframe(1))


def test_what_is_set_whichever_way_an_if_goes_is_set_in_each_round() -> None:
    for loop in batches():
        if sys.flags.optimize:
            chosen = 1
        else:
            chosen = 2
        assert loop.set_in_some_rounds() == set(), chosen


def test_what_is_set_and_read_under_one_condition_is_there() -> None:
    for loop in batches():
        if sys.maxsize:
            start = 1
        found = loop.set_in_some_rounds()
        if sys.maxsize:
            assert found == {"missing"}, start
        if sys.flags.optimize:
            missing = 1
        if found != {"missing"}:
            print(missing)


def test_what_a_loader_is_made_of_may_be_counted() -> None:
    for loop in batches(dict(zip("ab", enumerate("cd"), strict=True))):
        assert loop.counting is None and loop.counting_around is None
    for _, loop in enumerate(batches()):
        assert loop.counting is not None
