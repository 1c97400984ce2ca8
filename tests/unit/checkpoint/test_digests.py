"""Digests of a state, leaf by leaf: equal bits have equal digests, and any other bit, place, dtype or shape has not."""

from __future__ import annotations

import itertools

import pytest
import torch

from jobkit.checkpoint.digests import CHUNK, leaf_digests, plain_leaves, tensor_digests, weighted_sums
from jobkit.checkpoint.leaves import Leaves
from jobkit.checkpoint.tree import flatten

TENSORS = {
    "floats": torch.linspace(-1, 1, 12).reshape(3, 4),
    "halves": torch.linspace(-1, 1, 12).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "numbers": torch.arange(5),
    "complex": torch.randn(4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)),
    "small complex": torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "scalar": torch.tensor(0.5),
    "turned": torch.arange(12.0).reshape(3, 4).T,
}


def digest(tensor: torch.Tensor) -> str:
    return tensor_digests({"": tensor})[""]


def sums(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(weighted_sums(tensor).tolist())


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("of", [digest, sums])
def test_equal_bits_have_equal_digests_and_each_bit_counts(name: str, of: object) -> None:
    assert callable(of)
    tensor = TENSORS[name]
    assert of(tensor) == of(tensor.clone())
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    found = {of(tensor)}
    for place in range(octets.numel()):
        changed = octets.clone()
        changed[place] ^= 1
        found.add(of(changed.view(tensor.dtype).view(tensor.shape)))
    assert len(found) == 1 + octets.numel()


def test_sums_wrap_where_a_tensor_is_long_and_see_an_exchange_across_its_chunks() -> None:
    tensor = torch.full((CHUNK + 3,), 255, dtype=torch.uint8)
    tensor[0], tensor[-1] = 1, 2
    exchanged = tensor.clone()
    exchanged[0], exchanged[-1] = 2, 1
    assert sums(tensor) != sums(exchanged)


def test_any_exchange_of_two_and_any_sign_of_zero_is_seen() -> None:
    tensor = torch.arange(16, dtype=torch.float64)
    found = {sums(tensor), sums(-tensor)}
    for one, other in itertools.combinations(range(16), 2):
        exchanged = tensor.clone()
        exchanged[[one, other]] = tensor[[other, one]]
        found.add(sums(exchanged))
    assert len(found) == 2 + 16 * 15 // 2
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def test_the_dtype_and_the_shape_count() -> None:
    empty = torch.zeros(0)
    forms = [empty, empty.half(), torch.zeros(2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.float64)]
    assert len({digest(form) for form in forms}) == len(forms)


def test_leaves_have_paths_and_plain_values_are_readable() -> None:
    state = {"best": 0.5, "steps": [1, 2], "inner": {"weight": torch.ones(2), 3: "text"}, "none": None, "empty": []}
    tree = flatten(state)
    found = leaf_digests(Leaves(tree.leaves, tree.skeleton))
    weight = found.pop("inner.weight")
    assert weight == digest(torch.ones(2))
    assert found == {"best": "0.5", "steps.0": "1", "steps.1": "2", "inner.3": '"text"', "none": "null", "empty": "[]"}


def test_a_long_list_of_numbers_is_one_leaf_and_its_text_is_short() -> None:
    history = [float(number) for number in range(1000)]
    before = dict(plain_leaves(flatten({"history": history}).skeleton))
    after = dict(plain_leaves(flatten({"history": [*history[:-1], -1.0]}).skeleton))
    assert list(before) == list(after) == ["history"]
    assert before != after
    assert len(before["history"]) == 32
