"""Which rank computes which batch of an evaluation: whoever is free, or all in step.

Both are iterables of batch numbers, made on every rank with the same numbers, and iterated once. Who loads batches
ahead calls `take` instead, which reserves one, and `proceed` before each that is computed. `stop` ends the hand-out on
all ranks: each finishes the batch it has, and what it has reserved beyond that is computed by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

NOT_YET = -1
"""What `take` returns instead of a batch where this rank has enough of them for now."""

STOPPED = 1 << 32
"""Above what the counter of a hand-out comes to by counting."""


class DynamicBatches:
    """The next batch goes to the rank that asks next: a slow one does less, and holds the others up by a batch at most.

    Where batches are loaded ahead, a rank reserves no more of those that are left than it will come to at its pace so
    far, so that nobody waits at the end for what a slow one has reserved.

    `store` is one that all `ranks` share, `key` that of a counter in it, for this hand-out alone.
    """

    def __init__(self, numbers: Sequence[int], store: Store, key: str, ranks: int = 1) -> None:
        self.numbers = numbers
        self.taken = 0
        """Handed out, over all ranks, when this rank last asked."""
        self._own = 0
        self._stopped = False
        self._store, self._key, self._ranks = store, key, ranks

    def __iter__(self) -> Iterator[int]:
        return _each(self)

    def take(self, held: int = 0) -> int | None:
        """The next batch's number; None at the end, NOT_YET where the `held` ones not computed yet are enough."""
        if held and self._ranks > 1:
            self._look(self._store.add(self._key, 0))
            left = len(self.numbers) - self.taken
            share = min(self._own / self.taken, 1 / self._ranks)
            if left and held + 1 > share * left:
                return NOT_YET
        turn = self._store.add(self._key, 1) - 1
        self._look(turn + 1)
        if turn >= len(self.numbers):
            return None
        self._own += 1
        return self.numbers[turn]

    def proceed(self) -> bool:
        """Whether to compute another batch, as far as this rank knows."""
        return not self._stopped

    def stop(self) -> None:
        """Hand out no more: the counter goes past the end."""
        self._stopped = True
        self._store.add(self._key, STOPPED)

    def _look(self, count: int) -> None:
        self._stopped = self._stopped or count >= STOPPED
        self.taken = min(count, len(self.numbers))


class LockstepBatches:
    """Rounds in which every rank has a batch: for models whose forward pass is a collective.

    In the last round a rank for which none is left computes one that another rank computes too. Ranks of one data rank
    (the parts of a tensor- or pipeline-parallel model) get the same batches. Before each round `anywhere` tells
    whether a flag is set on any rank.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        data_rank: int,
        data_ranks: int,
        anywhere: Callable[[bool], bool] = lambda flag: flag,
    ) -> None:
        self.numbers = numbers
        self.taken = 0
        """Begun, over all ranks."""
        self._data_rank, self._data_ranks = data_rank, data_ranks
        self._anywhere = anywhere
        self._reserved = 0
        """As `taken`, for what was reserved."""
        self._stopped = False

    def __iter__(self) -> Iterator[int]:
        return _each(self)

    def take(self, held: int = 0) -> int | None:
        """The next batch's number, the same whenever it is asked for; None at the end."""
        first, count = self._reserved, len(self.numbers)
        if first >= count:
            return None
        self._reserved += self._data_ranks
        return self.numbers[(first + self._data_rank) % count]

    def proceed(self) -> bool:
        """Whether all ranks compute another batch; collective."""
        if self.taken >= len(self.numbers) or self._anywhere(self._stopped):
            return False
        self.taken = min(self.taken + self._data_ranks, len(self.numbers))
        return True

    def stop(self) -> None:
        """Hand out no more from the next round on."""
        self._stopped = True


HandOut = DynamicBatches | LockstepBatches


def _each(batches: HandOut) -> Iterator[int]:
    while batches.proceed() and (number := batches.take()) is not None:
        yield number
