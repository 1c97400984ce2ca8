"""What a tracked object is like when it is tracked: what is changed before the loop begins, a resume would not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jobkit.checkpoint.summary import Summary, first_difference, summarise
from jobkit.errors import UsageError
from jobkit.train.data import Loader
from jobkit.train.names import named_parameters


class Mark:
    """One object as it was at ctx.track, where it was restored or not."""

    def __init__(self, name: str, value: Any, *, is_restored: bool) -> None:
        self._name, self._value = name, value
        self._is_restored_module = is_restored and isinstance(value, nn.Module)
        self._position = value.position if isinstance(value, Loader) else None
        self._has_schedule = _has_schedule(value)
        self._weights = self._summary()

    def _summary(self) -> Summary:
        return summarise(named_parameters(self._value)) if self._is_restored_module else {}

    def check(self) -> None:
        """Raise UsageError where it has been changed since in a way that each resume would repeat, or undo."""
        if self._position is not None and self._value.position != self._position:
            raise UsageError(
                f"{self._name}: a batch was drawn between ctx.track and the first step, and each resume would draw "
                "another one there: take it before ctx.track, or from a loader of its own; ask for steps before "
                "batches, as in zip(ctx.steps(n), loader)"
            )
        if _has_schedule(self._value) and not self._has_schedule:
            raise UsageError(
                f"a learning-rate schedule of {self._name} was made after ctx.track({self._name}=...), and would set "
                "the rate anew at each resume: make it before, and track it too"
            )
        if (found := first_difference(self._weights, self._summary())) is not None:
            raise UsageError(
                f"{self._name}: {found.path} was changed after ctx.track had restored it, from {found.here} to "
                f"{found.there}: load and initialise weights before ctx.track"
            )


def _has_schedule(value: Any) -> bool:
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    return is_optimizer and any("initial_lr" in group for group in value.param_groups)
