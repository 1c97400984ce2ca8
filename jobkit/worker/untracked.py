"""Optimizers that train what is tracked and are not tracked: an interrupted run would lose what they remember."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from jobkit.errors import UsageError
from jobkit.train.optimizer_state import parameters_of
from jobkit.train.parallel import unwrapped

_LONGEST = 1000
"""Entries up to which a list or dict is looked through."""

_DEEPEST = 3
"""So deep optimizers are looked for in other objects, as in one that warms up the rate of the one it has."""


class SteppingOptimizers:
    """Sees which optimizers take a step, until the first have."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.optim.Optimizer] = {}
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._seen[id(optimizer)] = optimizer

    def check(self, tracked: Collection[Any]) -> bool:
        """Whether any has been seen. Raises UsageError for one that has state, trains something tracked and is not."""
        if not self._seen:
            return False
        self.end()
        known = {id(one) for value in tracked for one in _optimizers_in(value, 0)}
        modules = [unwrapped(value) for value in tracked if isinstance(value, nn.Module)]
        held = {id(parameter) for module in modules for parameter in module.parameters()}
        for optimizer in self._seen.values():
            trains = any(id(parameter) in held for parameter in parameters_of(optimizer))
            remembers = any(not isinstance(one, dict) or one for one in optimizer.state.values())
            if id(optimizer) not in known and trains and remembers:
                raise UsageError(
                    f"the {type(optimizer).__name__} that trains the tracked model is not tracked, so a run that is "
                    "interrupted would lose its state: ctx.track(optimizer=...) before ctx.steps"
                )
        return True

    def end(self) -> None:
        """Look no more."""
        self._handle.remove()


def _optimizers_in(value: Any, depth: int) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
    if depth == _DEEPEST or isinstance(value, nn.Module):
        return
    inside: Collection[Any] = vars(value).values() if hasattr(value, "__dict__") else ()
    if isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    for one in inside if len(inside) <= _LONGEST else ():
        yield from _optimizers_in(one, depth + 1)
