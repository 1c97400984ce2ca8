"""What the iterator of a DataLoader fetches in one pass, and what its workers would draw next."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from jobkit.train.positions import Positions
from jobkit.train.worker_draws import Told, WorkerBegin

Draws = dict[int, bytes]
"""By worker, what it would draw next."""

_AHEAD = 16
"""Batches that a loader around a DataLoader may be ahead of what it hands out."""


class Tap:
    """Stands between a DataLoader's iterator and whoever takes its batches, in one pass.

    Args:
        loader: the DataLoader.
        positions: the pass's sampler.
        state: what `state()` was in an attempt that stopped in this pass: how many batches had come out of the
            iterator; from which on they are loaded again, so that each is the same worker's; those that were not handed
            out, which come first; and what workers would have drawn next.
        draws: what kept workers would have drawn next as the pass began.
    """

    def __init__(self, loader: DataLoader[Any], positions: Positions, state: Mapping[str, Any], draws: Draws) -> None:
        self.positions, self.first = positions, draws
        self.fetched = int(state["fetched"])
        self.ahead: deque[Any] = deque(state["ahead"], maxlen=_AHEAD)
        self._ready, self._drop = deque(state["ahead"]), self.fetched - int(state["begin"])
        self._workers = loader.num_workers
        kept = 2 + (loader.prefetch_factor or 0)
        self._told: dict[int, deque[tuple[int, bytes]]] = defaultdict(lambda: deque(maxlen=kept))
        """By worker: (number of a batch, what it would have drawn next after it), of the newest."""
        for worker, told in state["told"].items():
            self._told[worker].extend(told)
        self._iterator: Any = None

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        begin = self._begin()
        told = {worker: [one for one in known if one[0] < begin][-1:] for worker, known in self._told.items()}
        return {"fetched": self.fetched, "begin": begin, "ahead": list(self.ahead), "told": told}

    def draws(self) -> Draws:
        """What its workers draw next after all that has come."""
        return {**self.first, **{worker: told[-1][1] for worker, told in self._told.items() if told}}

    def attach(self, iterator: Any) -> None:
        """Stand there from now on."""
        self._iterator = weakref.ref(iterator)  # its end ends its workers: nothing here may keep it
        iterator.jobkits_tap, iterator._next_data = self, self._next_data
        if self._workers:
            iterator._get_data = self._get_data

    def _get_data(self) -> Any:
        """In the order in which they come, which is not that in which they are handed out."""
        iterator = self._iterator()
        number, batch = type(iterator)._get_data(iterator)
        if isinstance(batch, Told):
            self._told[batch.worker].append((batch.number, batch.draws))
            batch = batch.batch
        return number, batch

    def _next_data(self) -> Any:
        iterator = self._iterator()
        if self.positions.is_left:
            return type(iterator)._next_data(iterator)
        self.positions.start()
        if self._ready:
            return self._ready.popleft()
        while True:
            batch = type(iterator)._next_data(iterator)
            if self._drop:
                self._drop -= 1
                continue
            self.fetched += 1
            self.ahead.append(batch)
            self.positions.forget(self._begin())
            return batch

    def _begin(self) -> int:
        return self.fetched - self.fetched % self._workers if self._workers else self.fetched


def untapped(fetched: int) -> dict[str, Any]:
    """The state of a Tap of which no more is known than that so many batches have come out."""
    return {"fetched": fetched, "begin": fetched, "ahead": [], "told": {}}


def kept_draws(loader: DataLoader[Any] | None) -> Draws | None:
    """What workers that outlive a pass draw next, between two passes; None where there are none."""
    iterator: Any = getattr(loader, "_iterator", None)
    tap: Tap | None = getattr(iterator, "jobkits_tap", None)
    if loader is None or tap is None:
        return None
    if not isinstance(loader.dataset, IterableDataset):
        _wait_for_workers(iterator)
    return tap.draws()


def _wait_for_workers(iterator: Any) -> None:
    """A pass was left early: what was asked for besides is drawn, and thrown away as the next one begins."""
    while any(len(task) == 1 for task in iterator._task_info.values()):
        number, batch = iterator._get_data()
        iterator._task_info[number] += (batch,)


@contextmanager
def tapped(loader: DataLoader[Any], tap: Tap) -> Iterator[None]:
    """While an iterator of `loader` is made it is the tap's; new workers begin with what the tap knows of others."""
    own: Any = loader
    kept = getattr(own, "_iterator", None)

    def make() -> Any:
        iterator = type(own)._get_iterator(own)
        tap.attach(iterator)
        return iterator

    with ExitStack() as stack:
        stack.enter_context(_replaced(own, _name(own), tap.positions))
        stack.enter_context(_replaced(own, "_get_iterator", make))
        if own.num_workers:
            begin = WorkerBegin(own.worker_init_fn, own.collate_fn, tap.draws())
            stack.enter_context(_replaced(own, "worker_init_fn", begin))
        if kept is not None:
            kept._index_sampler = tap.positions
        yield


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What DataLoader asks for the next batch's numbers."""
    return vars(loader)[_name(loader)]


def _name(loader: DataLoader[Any]) -> str:
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


_MISSING = object()


@contextmanager
def _replaced(loader: Any, name: str, value: Any) -> Iterator[None]:
    """DataLoader refuses to have its sampler set, which this does for the making of an iterator."""
    before = vars(loader).get(name, _MISSING)
    vars(loader)[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del vars(loader)[name]
        else:
            vars(loader)[name] = before
