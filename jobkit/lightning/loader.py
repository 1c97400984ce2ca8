"""A training loader of the script's own, as the Trainer iterates over it: each pass knows its place.

    Trainer --iter--> ResumableLoader --> Iteration --next--> Pass (data/foreign_loader.py) --> the script's loader

callback.py wraps the training's loaders with it; state.py saves and restores the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jobkit.data.foreign_loader import Pass, draw_base


class ResumableLoader:
    """A loader with the attributes of the script's loader."""

    def __init__(self, loader: Any) -> None:
        self._jobkit_loader = loader

    def __iter__(self) -> Iteration:
        return Iteration(self._jobkit_loader)

    def __len__(self) -> int:
        return len(self._jobkit_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_jobkit_loader"], name)


class Iteration(Iterator[Any]):
    """One pass. Its number is drawn at the first batch: by then the generators of a resumed run are restored."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pass: Pass | None = None
        self._batches: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = Pass(self._loader, draw_base())
            self._batches = iter(self._pass)
        batch = next(self._batches)
        self._pass.taken += 1
        return batch

    def ids(self, ahead: int) -> list[int]:
        """Return the ids of the samples of the newest batch; `ahead` batches were fetched after it."""
        return self._pass.ids(self._pass.taken - 1 - ahead) if self._pass is not None else []

    def state(self, ahead: int) -> dict[str, Any]:
        """Return the place: `ahead` batches, 0 or 1, were fetched and not used. Empty before the first batch."""
        if self._pass is None:
            return {}
        state = self._pass.state_dict(ahead)
        if not ahead:  # a stream's own state is that before the newest batch; without it the stream is read again
            state["stream"] = None
        return {"base": self._pass.base, "state": state}

    def place(self, place: Mapping[str, Any]) -> None:
        """Go on at a place."""
        self._pass = Pass(self._loader, place["base"], place["state"]) if place else None
        self._batches = iter(self._pass or ())
