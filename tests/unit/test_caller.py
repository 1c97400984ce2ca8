"""What is read of the frame of a script whose loop jobkit drives."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from jobkit.worker.caller import local_variables


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
