"""ctx.values: plain values of a training script, as its best score, in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jobkit.errors import UsageError

_PLAIN = (bool, int, float, str, type(None))


class Values:
    """Plain values by name, as attributes: numbers, texts, None, and lists, tuples and dicts of such.

    A number of NumPy's, and a tensor of one element, become Python's. Each rank has its own.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            value = value.item()
        _check(name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """A copy of the values. Raises UsageError where one has become something else."""
        for name, value in vars(self).items():
            _check(name, value)
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; a list or dict stays the object that the script may hold."""
        for name, value in copy.deepcopy(dict(state)).items():
            held = vars(self).get(name)
            if isinstance(held, dict) and isinstance(value, dict):
                held.clear()
                held.update(value)
            elif isinstance(held, list) and isinstance(value, list):
                held[:] = value
            else:
                vars(self)[name] = value


def _check(name: str, value: Any) -> None:
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, (list, tuple)):
        for one in value:
            _check(name, one)
    elif isinstance(value, dict):
        for key, one in value.items():
            _check(name, key)
            _check(name, one)
    else:
        raise UsageError(
            f"ctx.values: {name} is a {type(value).__name__}, allowed are numbers, texts, None, and lists and dicts of "
            "such; what has a state_dict is tracked: ctx.epochs(n, model=model) or ctx.track(model=model)"
        )
