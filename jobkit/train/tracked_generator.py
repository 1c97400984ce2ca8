"""A generator of a script's own, as its mixup draws from: its state is part of the checkpoint, each rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobkit.train.own_state import generator_kind, generator_state, set_generator_state


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of Python's, NumPy's or torch's."""
    return generator_kind(value) is not None


class TrackedGenerator:
    """Has the state_dict that a generator has not."""

    state_is_per_rank = True

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """What it would draw next."""
        return {"state": generator_state(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw what it would have drawn next."""
        set_generator_state(self.generator, state["state"])
