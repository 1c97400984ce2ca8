"""ctx.values: plain values and tensors of a training script, as its best score, in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


class Values:
    """Values by name, as attributes: `state = ctx.values(best=0.0, x=x)`; `state.best = 1.0`.

    Numbers, texts, None, tensors, and lists and dicts of these are kept as they are given. Each rank has its own.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint. A tensor, a list or a dict stays the object that the script may hold."""
        for name, value in state.items():
            held = vars(self).get(name)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
                with torch.no_grad():
                    held.copy_(value)
            elif isinstance(held, dict) and isinstance(value, dict):
                held.clear()
                held.update(copy.deepcopy(value))
            elif isinstance(held, list) and isinstance(value, list):
                held[:] = copy.deepcopy(value)
            else:
                vars(self)[name] = value
