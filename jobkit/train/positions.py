"""A loader's sampler for one pass, which another attempt can begin in its middle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jobkit.train.worker_draws import Asked


class Positions:
    """What `sampler` hands out, from item `begin` on: what a stopped attempt had asked it for is not drawn again.

    Args:
        state: what `state()` was in an attempt that stopped in this pass.
        asks: whether each is handed on as an Asked, with its number: to workers.
        begun: called where the sampler's iterator is made.
        at_place: called once, where the sampler stands as it stood, before anything is handed on.
    """

    stands_for = "_sampler"

    def __init__(
        self,
        sampler: Any,
        state: Mapping[str, Any],
        begin: int,
        *,
        asks: bool,
        begun: Callable[[], object],
        at_place: Callable[[], object],
    ) -> None:
        self._sampler, self._asks = sampler, asks
        self._begun: Callable[[], object] = begun
        self._at_place: Callable[[], object] = at_place
        self._asked, self._has_ended = int(state["asked"]), bool(state["has_ended"])
        self._recent: deque[tuple[int, Any]] = deque(one for one in state["recent"] if one[0] >= begin)
        """(number, item) of those that were handed on, and may have to be once more."""
        self._items: Iterator[Any] = iter(())
        self._has_started = False
        self.is_left = False
        """Whether somebody else makes a pass with workers that were kept: what they draw is told then, too."""

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {"asked": self._asked, "has_ended": self._has_ended, "recent": list(self._recent)}

    def forget(self, before: int) -> None:
        """Items with lower numbers are not asked for again."""
        while self._recent and self._recent[0][0] < before:
            self._recent.popleft()

    def start(self) -> None:
        """Go to the place, where that has not been done."""
        if self._has_started:
            return
        self._has_started = True
        for _ in range(self._asked + self._has_ended):
            next(self._items, None)
        at_place, self._at_place, self._begun = self._at_place, bool, bool
        at_place()  # it knows the iterator, whose workers end with the last reference to it

    def __iter__(self) -> Iterator[Any]:
        if self._has_started:
            self.is_left = True
            return self._of_others(iter(self._sampler))
        self._begun()
        self._items = iter(self._sampler)  # DataLoader with workers does so twice, and uses the second
        return self._run()

    def _of_others(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            yield Asked(item, number) if self._asks else item

    def _run(self) -> Iterator[Any]:
        self.start()
        for number, item in list(self._recent):
            yield Asked(item, number) if self._asks else item
        while not self._has_ended:
            try:
                item = next(self._items)
            except StopIteration:
                self._has_ended = True
                return
            number, self._asked = self._asked, self._asked + 1
            self._recent.append((number, item))
            yield Asked(item, number) if self._asks else item

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


def at(taken: int) -> dict[str, Any]:
    """The state of Positions of which so many were handed on, and no more is known."""
    return {"asked": taken, "has_ended": False, "recent": []}
