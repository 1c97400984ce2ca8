"""A state in parts is the same state again, kinds of values and keys kept."""

from __future__ import annotations

import collections
import math
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from jobkit.checkpoint.tree import flatten, rebuild
from jobkit.errors import CheckpointError

VALUES: dict[str, Any] = {
    "plain values": [None, True, 3, -1.5, "text", b"\x00\xff", bytearray(b"x"), 1 + 2j],
    "floats that JSON does not have": [math.inf, -math.inf],
    "keys of several kinds": {10: "a", 9: "b", "10": "c", None: "d", (1, "x"): "e", 2.5: "f", True: "g"},
    "containers": [(1, 2), {3, 1}, frozenset({2}), collections.deque([1, 2], maxlen=5), []],
    "mappings": [
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        collections.defaultdict(list, {1: [2]}),
    ],
    "kinds of torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "numbers of numpy": [np.float32(1.5), np.int64(7), np.bool_(True)],
    "a large integer": 1 << 200,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name: str) -> None:
    tree = flatten(VALUES[name])
    again = rebuild(tree.skeleton, tree.leaves, may_unpickle=False)
    assert again == VALUES[name]
    assert repr(again) == repr(VALUES[name])
    assert tree.pickled == []


def test_nan_comes_back() -> None:
    tree = flatten({"a": math.nan})
    assert math.isnan(rebuild(tree.skeleton, {}, may_unpickle=False)["a"])


def test_tensors_and_arrays_are_leaves_by_their_path() -> None:
    tensor, array = torch.rand(2, 3), np.arange(6, dtype=">i4").astype("<i4").reshape(2, 3)
    tree = flatten({"x": {"y": [tensor]}, "array": array, "empty": np.zeros((0, 2))})
    assert list(tree.leaves) == ["x/y/0", "array", "empty"]
    assert tree.leaves["x/y/0"].data_ptr() == tensor.data_ptr()
    again = rebuild(tree.skeleton, tree.leaves, may_unpickle=False)
    assert again["x"]["y"][0] is not tensor
    assert np.array_equal(again["array"], array)
    assert again["array"].dtype == array.dtype
    assert again["empty"].shape == (0, 2)


def test_keys_with_equal_texts_have_leaves_of_their_own() -> None:
    tree = flatten({1: torch.zeros(1), "1": torch.ones(1)})
    again = rebuild(tree.skeleton, tree.leaves, may_unpickle=False)
    assert (again[1].item(), again["1"].item()) == (0, 1)


def test_a_foreign_object_is_pickled_and_read_only_from_a_file_of_ones_own() -> None:
    tree = flatten({"path": PurePosixPath("a/b")})
    assert tree.pickled == ["path"]
    assert rebuild(tree.skeleton, {}, may_unpickle=True) == {"path": PurePosixPath("a/b")}
    with pytest.raises(CheckpointError):
        rebuild(tree.skeleton, {}, may_unpickle=False)


def test_functions_stay_the_live_ones() -> None:
    def saved() -> None: ...
    def live() -> None: ...

    tree = flatten({"lambdas": [saved]})
    assert rebuild(tree.skeleton, {}, {"lambdas/0": live}, may_unpickle=False) == {"lambdas": [live]}


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CheckpointError, match="a/lock"):
        flatten({"a": {"lock": __import__("threading").Lock()}})
