"""ctx.values and jobkit.attributes: a restore fills the objects that a script holds by another name."""

from __future__ import annotations

import datetime
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jobkit
from jobkit.checkpoint.tree import flatten, rebuild
from jobkit.errors import UsageError
from jobkit.loop.values import Values, replaced_by_restores


def restored(state: dict[str, Any]) -> Any:
    """Return a state as a checkpoint gives it back."""
    tree = flatten(state)
    return rebuild(tree.skeleton, {path: leaf.clone() for path, leaf in tree.leaves.items()}, may_unpickle=False)


HELD: dict[str, tuple[Any, Any]] = {
    "array": (np.arange(3.0), lambda: np.array([5.0, 6.0, 7.0])),
    "tensor": (torch.zeros(2), lambda: torch.ones(2)),
    "list": ([1, [2]], lambda: [3, [4], 5]),
    "dict": ({"a": [1]}, lambda: {"a": [2], "b": 3}),
    "counter": (Counter("aab"), lambda: Counter("b")),
    "set": ({1, 2}, lambda: {3}),
    "deque": (deque([1, 2], maxlen=3), lambda: deque([7, 8, 9], maxlen=3)),
    "bytes": (bytearray(b"abc"), lambda: bytearray(b"x")),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_restore_fills_the_object_that_a_script_holds(kind: str) -> None:
    held, make = HELD[kind]
    values = Values({"value": held})
    assert replaced_by_restores({"value": held}) is None
    values.load_state_dict(restored({"value": make()}))
    assert values.value is held
    assert str(held) == str(make())


def test_an_array_within_a_deque_is_filled_too() -> None:
    array = np.zeros(2)
    values = Values({"window": deque([array], maxlen=2)})
    values.load_state_dict(restored({"window": deque([np.ones(2), np.full(2, 2.0)], maxlen=2)}))
    assert values.window[0] is array and array.tolist() == [1, 1] and values.window[1].tolist() == [2, 2]


def test_a_tensor_of_inference_mode_is_filled_too() -> None:
    with torch.inference_mode():
        held = torch.zeros(2)
    values, weight = Values({"labels": held, "weight": torch.zeros(2, requires_grad=True)}), torch.ones(2)
    for mode in (False, True):
        with torch.inference_mode(mode):
            values.load_state_dict(restored({"labels": torch.ones(2), "weight": weight * 2}))
    assert values.labels is held and held.tolist() == [1, 1] and held.is_inference()
    assert values.weight.tolist() == [2, 2] and values.weight.is_leaf


ALIASES: dict[str, tuple[Any, Any]] = {
    "arrays": (deque([np.zeros(2)] * 3, maxlen=3), lambda: deque([np.zeros(2), np.ones(2), np.full(2, 2.0)], maxlen=3)),
    "tensors": ([torch.zeros(2)] * 3, lambda: [torch.zeros(2), torch.ones(2), torch.ones(2)]),
    "types": ([torch.zeros(2)] * 2, lambda: [torch.zeros(2), torch.zeros(2, dtype=torch.int64)]),
    "longer": ([torch.zeros(2)] * 2, lambda: [torch.zeros(2), torch.zeros(3)]),
    "keys": (dict.fromkeys("ab", torch.zeros(1)), lambda: {"a": torch.zeros(1), "b": torch.ones(1)}),
    "lists": ([[0]] * 2, lambda: [[1], [2]]),
    "nested": ({"a": [x := [torch.zeros(1)]], "b": x}, lambda: {"a": [[torch.ones(1)]], "b": [torch.zeros(1)]}),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_places_that_began_with_one_object_get_their_own_values(kind: str) -> None:
    held, make = ALIASES[kind]
    for state in (Values({"value": held}), jobkit.attributes(Values({"value": held}), "value")):
        for _ in range(2):  # as a run restores once more at its first batch
            state.load_state_dict(restored({"value": make()}))
            assert repr(held) == repr(make())


def test_an_object_at_two_places_stays_one_where_its_values_are_equal() -> None:
    held = torch.zeros(2)
    values = Values({"one": held, "several": [held, held], "other": held})
    new = torch.tensor([float("nan"), 1.0])
    values.load_state_dict(restored({"one": new, "several": [new, new], "other": torch.ones(2)}))
    assert values.one is held and values.several[0] is held and values.several[1] is held
    assert str(held) == str(new) and values.other.tolist() == [1, 1]


class Meter:
    def __init__(self) -> None:
        self.total, self.seen, self.inner = 0.0, [1], None


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": {"meter": Meter()}}, ("a/meter", "Meter")),
        ({"a": [1, random.Random(0)]}, ("a/1", "Random")),
        ({"rng": np.random.default_rng(0)}, ("rng", "Generator")),
        ({"path": Path("x"), "day": datetime.date(2026, 1, 1), "kind": torch.float16, "none": None, "f": len}, None),
    ],
)
def test_an_object_that_a_restore_would_replace_is_found(values: dict[str, Any], found: Any) -> None:
    assert replaced_by_restores(values) == found


def test_attributes_of_an_object_are_its_state() -> None:
    meter, other = Meter(), Meter()
    meter.total, meter.seen = 2.0, [1, 2]
    seen = other.seen
    jobkit.attributes(other, "total", "seen").load_state_dict(
        restored(jobkit.attributes(meter, "total", "seen").state_dict())
    )
    assert (other.total, other.seen) == (2.0, [1, 2]) and other.seen is seen


def test_the_state_of_a_numpy_generator_is_an_attribute() -> None:
    generator, other = np.random.default_rng(1), np.random.default_rng(2)
    generator.random(5)
    state = restored(jobkit.attributes(generator.bit_generator, "state").state_dict())
    expected = generator.random(3).tolist()
    jobkit.attributes(other.bit_generator, "state").load_state_dict(state)
    assert other.random(3).tolist() == expected


def test_attributes_refuse_what_they_cannot_keep() -> None:
    meter = Meter()
    with pytest.raises(UsageError, match=r"no attribute 'totl'.*total"):
        jobkit.attributes(meter, "totl")
    with pytest.raises(UsageError, match="name the attributes"):
        jobkit.attributes(meter)
    meter.inner = Meter()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="inner of a Meter is a Meter"):
        jobkit.attributes(meter, "inner")
