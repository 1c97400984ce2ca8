"""A Trainer's loader, whose passes can tell where they stand, and go on there."""

from __future__ import annotations

from typing import Any

from jobkit.train.loader_pass import LoaderPass, data_loader
from jobkit.train.own_state import own_state, set_own_state
from jobkit.train.tap import kept_draws

Position = dict[str, Any]
"""Where a pass stands, on one rank, or where the one before has ended; it can be pickled."""


class ContinuedLoader:
    """`loader`, which hands out what it would, and can tell and take up the position of a pass over it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._pass: LoaderPass | None = None
        self._resume: Position = {}

    def position(self, *, is_mid: bool) -> Position:
        """Where it stands; `is_mid`: in the middle of a pass."""
        state = self._pass.state() if is_mid and self._pass is not None else None
        draws = None if is_mid else kept_draws(data_loader(self.loader))
        return {"pass": state, "draws": draws, "own": own_state(self.loader)}

    def between_passes(self) -> Position:
        """Where it stands, between two passes, or before the first, which may be one that goes on."""
        return self._resume or self.position(is_mid=False)

    def continue_from(self, position: Position) -> None:
        """Let the next pass go on there."""
        self._resume = position
        if position["pass"] is None:
            set_own_state(self.loader, position["own"])

    def __iter__(self) -> LoaderPass:
        resume, self._resume = self._resume, {}
        self._pass = LoaderPass(self.loader, resume.get("pass"), draws=resume.get("draws"))
        return self._pass

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the loader, which others ask for."""
        return type(self.loader)
