"""What ctx.track does not take is refused in one line, which says what to write instead."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from jobkit.worker.trackable import check_trackable

DATASET = TensorDataset(torch.ones(4))
LAYER = nn.Linear(1, 1)


class Counter:
    """A class of a user's, without a state."""


PLAIN = "state = ctx.values(best="


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, ["found a float", f"{PLAIN}0.5)"]),
        (3, ["found an int", f"{PLAIN}3)"]),
        ("x", ["found a str", f"{PLAIN}'x')"]),
        (None, ["found None", f"{PLAIN}None)"]),
        ({"loss": 1.0}, ["found a dict", PLAIN]),
        ([1, 2], ["found a list", PLAIN]),
        ((1, 2), ["found a tuple", PLAIN]),
        (list(range(1000)), ["found a list", f"{PLAIN}...)"]),
        (numpy.float32(0.5), ["found a float32", f"{PLAIN}0.5)"]),
        ({"encoder": LAYER, "head": LAYER}, ["found a dict", "ctx.track(encoder=best['encoder'], head=best['head'])"]),
        ([LAYER, LAYER, LAYER], ["ctx.track(best_0=best[0], best_1=best[1], ...)"]),
        (DataLoader(DATASET), ["found a DataLoader", "for batch in ctx.batches(loader)", "ctx.loader(dataset"]),
        (RandomSampler(DATASET), ["found a RandomSampler", "ctx.batches(loader)"]),
        (DATASET, ["found a TensorDataset", "ctx.batches(loader)"]),
        (torch.Generator(), ["found a Generator", "ctx.batches(loader)"]),
        (random.Random(), ["found a Random", "draw from those"]),
        (torch.ones(2), ["found a Tensor", 'module.register_buffer("best", tensor)', PLAIN]),
        (len, ["found a function", "track the objects that it uses"]),
        (lambda: None, ["found a function", "track the objects that it uses"]),
        (nn.Linear, ["Linear is a class", "track the object"]),
        (Counter(), ["found a Counter", "add both to its class"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_state_is_refused_with_what_to_use(value: Any, said: list[str]) -> None:
    with pytest.raises(TypeError) as refused:
        check_trackable("best", value)
    text = str(refused.value)
    assert all(part in text for part in ["ctx.track(best=...): ", *said]) and "\n" not in text


def test_what_has_a_state_is_taken() -> None:
    class Stateful(DataLoader[Any]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    for value in (LAYER, torch.optim.SGD(LAYER.parameters()), Stateful(DATASET)):
        check_trackable("value", value)
