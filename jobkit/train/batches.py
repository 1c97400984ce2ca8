"""Which rank computes which batch of an evaluation: whoever is free, or all in step.

Both are iterables of batch numbers, made on every rank with the same numbers, and iterated once. `stop()` ends the
hand-out on all ranks: each finishes the batch it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]


class DynamicBatches:
    """The next batch goes to the rank that asks next: a slow one does less, and holds the others up by a batch at most.

    `store` is one that all ranks share, `key` that of a counter in it, for this hand-out alone.
    """

    def __init__(self, numbers: Sequence[int], store: Store, key: str) -> None:
        self.numbers = numbers
        self.taken = 0
        """Handed out, over all ranks, when this rank was last given one."""
        self._store, self._key = store, key

    def __iter__(self) -> Iterator[int]:
        while (turn := self._store.add(self._key, 1) - 1) < len(self.numbers):
            self.taken = turn + 1
            yield self.numbers[turn]

    def stop(self) -> None:
        """Hand out no more: the counter goes past the end."""
        self._store.add(self._key, len(self.numbers))


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
        """Handed out, over all ranks."""
        self._data_rank, self._data_ranks = data_rank, data_ranks
        self._anywhere = anywhere
        self._stopped = False

    def __iter__(self) -> Iterator[int]:
        count = len(self.numbers)
        for first in range(0, count, self._data_ranks):
            if self._anywhere(self._stopped):
                return
            self.taken = min(first + self._data_ranks, count)
            yield self.numbers[(first + self._data_rank) % count]

    def stop(self) -> None:
        """Hand out no more from the next round on."""
        self._stopped = True
