"""The training's loaders, as Lightning iterates over them: they can tell where they stand, and go on there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobkit.train.loader_pass import LoaderPass
from jobkit.train.own_state import own_state, set_own_state


class ResumableLoader:
    """A loader as the script made it, with its attributes, whose iterations have a position.

    What others, as a callback, read of it is no part of that. `waits`: whether the position is not known yet, for it is
    in a checkpoint that is still to be loaded; nothing is read until `Iteration.place`.
    """

    def __init__(self, loader: Any, *, waits: bool = False) -> None:
        self.loader, self.waits = loader, waits

    def __iter__(self) -> Iteration:
        return Iteration(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        """That of persistent workers, which Lightning ends at the end of the training."""
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    @property
    def worker_init_fn(self) -> Any:
        """The loader's; Lightning gives it one after `seed_everything(workers=True)`."""
        return getattr(self.loader, "worker_init_fn", None)

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self.loader.worker_init_fn = value

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning saves that of rank 0 for all. It sees by it that this loader can be resumed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Iteration:
    """One pass over a ResumableLoader."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._waits = loader.waits
        self._pass = LoaderPass(loader.loader)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._waits:
            raise StopIteration  # Lightning reads a stream's first batch ahead
        return next(self._pass)

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {"pass": self._pass.state()}

    def place(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after those of `state`. The process's own generators are left as they are."""
        self._waits = self._loader.waits = False
        found = state["pass"]
        set_own_state(self._loader.loader, found["own_now"])
        self._pass = LoaderPass(self._loader.loader, found if found["begin"] else None, draws=found["had"])


def own_states(loaders: list[Any]) -> list[dict[str, Any]]:
    """What the loaders' own generators and samplers have come to."""
    return [own_state(loader) for loader in loaders]


def set_own_states(loaders: list[Any], states: list[dict[str, Any]]) -> None:
    """Set it, where there are as many loaders."""
    for loader, state in zip(loaders, states, strict=False):
        set_own_state(loader, state)
