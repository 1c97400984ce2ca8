"""ctx.values: plain values and tensors of a training script, as its best score, in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf


class Values:
    """Values by name, as attributes: `state = ctx.values(best=0.0, x=x)`; `state.best = 1.0`.

    Numbers, texts, None, tensors, and lists and dicts of these are kept as they are given. Each rank has its own.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():  # a list or mapping of ctx.params is one of OmegaConf's
            vars(self)[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint. A tensor, a list or a dict stays the object that the script may hold."""
        for name, value in state.items():
            vars(self)[name] = _taken(vars(self).get(name), value)


def _taken(held: Any, value: Any) -> Any:
    """Return a value of a checkpoint, in the object that the script holds, where that is of its form."""
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and _form(held) == _form(value):
        with torch.no_grad():
            return held.copy_(value)
    if isinstance(held, dict) and isinstance(value, dict):
        items = {key: _taken(held.get(key), item) for key, item in value.items()}
        held.clear()
        held.update(items)
        return held
    if isinstance(held, list) and isinstance(value, list):
        held[:] = [_taken(held[number] if number < len(held) else None, item) for number, item in enumerate(value)]
        return held
    return copy.deepcopy(value)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
