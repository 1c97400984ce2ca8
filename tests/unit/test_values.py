"""ctx.values: plain values as attributes; what is none is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jobkit.errors import UsageError
from jobkit.worker.values import Values


def test_numbers_of_libraries_become_plain() -> None:
    state = Values({"best": np.float32(0.5), "count": torch.tensor(3), "name": None})
    assert state.state_dict() == {"best": 0.5, "count": 3, "name": None}


@pytest.mark.parametrize("value", [torch.ones(2), object(), [torch.ones(2)], {"a": {1, 2}}])
def test_what_is_not_plain_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"ctx.values: best is a \w+, allowed are numbers, texts"):
        Values({"best": value})
    state = Values({"best": []})
    state.best.append(value)
    with pytest.raises(UsageError, match=r"ctx.values: best is a"):
        state.state_dict()


def test_what_a_script_holds_of_the_values_is_restored_in_place() -> None:
    state = Values({"best": {"loss": 9.0}, "history": [], "epoch": 0})
    best, history = state.best, state.history
    state.load_state_dict({"best": {"loss": 1.0, "epoch": 2}, "history": [1, 2], "epoch": 3})
    assert best == {"loss": 1.0, "epoch": 2} and history == [1, 2] and state.epoch == 3
    best.update(loss=0.5)
    assert state.state_dict()["best"]["loss"] == 0.5
