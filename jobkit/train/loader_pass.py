"""One pass over a user's own loader, which another attempt continues in its middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.log import log
from jobkit.train.own_state import own_state, set_own_state
from jobkit.train.positions import Positions, at
from jobkit.train.stream_draws import StreamDraws
from jobkit.train.streams import lacks_its_buffer
from jobkit.train.tap import Draws, Tap, index_sampler, kept_draws, tapped, untapped

TOLD_FROM = 100
"""Batches of a stream from which it is said that they are read again: fewer take no time that anybody notices."""


class LoaderPass:
    """An iterator over the batches of a loader; `state` is that of a pass to be continued, with the same batches.

    Batches and random numbers are those of the loader alone. A DataLoader over a dataset with a length goes on at
    once: its sampler is asked for what was drawn, and nothing of that is loaded; what a loader around it (Accelerate's)
    had taken ahead is in the state, and new workers begin with what those before would have drawn. A loader with a
    state_dict (torchdata's StatefulDataLoader) is given its state. Any other is read again up to there. `draws` is what
    `kept_draws` found in the attempt before, of workers that outlive a pass.
    """

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None, *, draws: Draws | None = None) -> None:
        self.taken = 0 if state is None else int(state["taken"])
        """Batches handed out, those of earlier attempts included."""
        self._loader, self._base, self._resume = loader, data_loader(loader), state
        self._draws = draws
        self._iterator: Iterator[Any] | None = None
        self._tap: Tap | None = None
        self._begin: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._had: Draws | None = draws if state is None else state.get("had")
        """What workers that were kept from an earlier pass would have drawn next as this one began."""
        self._stream: StreamDraws | None = None

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        batch = self._open() if self._iterator is None else self._next()
        self.taken += 1
        if self._tap is not None and self._tap.ahead:
            self._tap.ahead.popleft()
        return batch

    def state(self) -> dict[str, Any]:
        """What another attempt continues from; after the batch that was handed out last."""
        if self._iterator is None and self._resume is not None:
            return dict(self._resume)
        found: dict[str, Any] = {"taken": self.taken, "begin": self._begin, "own": self._own, "had": self._had}
        if self._iterator is None:
            found["had"] = kept_draws(self._base) or self._draws
        found["own_now"] = own_state(self._parts)
        if _is_stateful(self._loader):
            found["loader"] = self._loader.state_dict()
        if self._tap is not None:
            workers = self._base.num_workers if self._base is not None else 0
            found |= {"tap": self._tap.state(), "positions": self._tap.positions.state(), "workers": workers}
        return found | {"stream": None if self._stream is None else self._stream.state()}

    @property
    def _parts(self) -> Any:
        return self._loader if self._base is None else self._base

    # The first batch

    def _open(self) -> Any:
        now = rng_state()
        resume = self._resume or {}
        if resume.get("begin"):
            set_rng_state(resume["begin"])
            set_own_state(self._parts, resume["own"])
        self._begin, self._own = rng_state(), own_state(self._parts)
        if _is_stateful(self._loader):
            return self._open_stateful(resume, now)
        if self._base is None or _is_read_again(self._loader, self._base):
            return self._open_stream(resume, now)
        known = "tap" in resume and resume["workers"] == self._base.num_workers
        tap = resume["tap"] if known else untapped(self.taken)
        positions = resume["positions"] if known else at(self.taken)
        with self._tapped(self._base, tap, positions, now if resume else None):
            self._iterator = iter(self._loader)
            return next(self._iterator)  # here: an iterator of a subclass may begin with its first batch only

    def _open_stateful(self, resume: Mapping[str, Any], now: dict[str, Any]) -> Any:
        self._stream = StreamDraws(None, self._begin)
        if "loader" in resume:
            self._loader.load_state_dict(resume["loader"])
        with self._stream.fetching(0):
            self._iterator = iter(self._loader)
        if resume:
            self._stream = StreamDraws(None, resume["stream"]["own"])
            set_rng_state(now)
        return self._next()

    def _open_stream(self, resume: Mapping[str, Any], now: dict[str, Any]) -> Any:
        if self.taken >= TOLD_FROM:
            log.info(
                "reading %d batches of the %s again, up to where the run stands; a loader with a state_dict, as "
                "torchdata's StatefulDataLoader, goes there at once",
                self.taken,
                type(getattr(self._loader, "dataset", self._loader)).__name__,
            )
        with ExitStack() as stack:
            if self._base is not None and self._base.num_workers:
                stack.enter_context(self._tapped(self._base, untapped(0), at(0), None))
            else:
                self._stream = StreamDraws(resume.get("stream"))
            self._iterator = iter(self._loader)
            for number in range(self.taken):
                if self._stream is not None:
                    self._stream.before_again(number)
                next(self._iterator)
            if self._stream is not None:
                self._stream.is_at_place()
            if resume:
                set_rng_state(now)
            return self._next()

    @contextmanager
    def _tapped(
        self,
        base: DataLoader[Any],
        state: Mapping[str, Any],
        positions: Mapping[str, Any],
        now: Mapping[str, Any] | None,
    ) -> Iterator[None]:
        """While the iterator is made; `now`: the random numbers to go on with once the sampler stands in its place."""
        kept: Any = getattr(base, "_iterator", None)
        if kept is not None and not hasattr(kept, "jobkits_tap"):
            base._iterator = kept = None  # workers of the script's own pass, which do not tell what they have drawn
        if kept is None and self._resume is None:
            self._had = self._draws

        def begun() -> None:
            if kept is None and self._had is not None:  # then no seed was drawn for workers
                set_rng_state(self._begin)
                set_own_state(base, self._own)

        def at_place() -> None:
            if kept is not None:  # what was under way in its workers has come
                tap.first = self._had = kept_draws(base) or {}
                tap.attach(kept)
            if now is not None:
                set_rng_state(now)
                set_own_state(base, (self._resume or {}).get("own_now", {}))

        sampler, asks = index_sampler(base), base.num_workers > 0
        of_pass = Positions(sampler, positions, state["begin"], asks=asks, begun=begun, at_place=at_place)
        tap = self._tap = Tap(base, of_pass, state, self._had or {})
        with tapped(base, tap):
            yield

    # The others

    def _next(self) -> Any:
        assert self._iterator is not None
        if self._stream is None:
            return next(self._iterator)
        with self._stream.fetching(self.taken):
            return next(self._iterator)


def data_loader(loader: Any) -> DataLoader[Any] | None:
    """The DataLoader that reads the dataset: itself, or the one that Accelerate has wrapped."""
    for one in (loader, getattr(loader, "base_dataloader", None)):
        if isinstance(one, DataLoader) and "batch_sampler" in vars(one) and not _is_stateful(one):
            return one
    return None


def _is_read_again(loader: Any, base: DataLoader[Any]) -> bool:
    """A stream has no place to go to; and a dispatcher of Accelerate's fills its last batch with its first."""
    kinds = [one.__name__ for one in type(loader).__mro__]
    return isinstance(base.dataset, IterableDataset) or "DataLoaderDispatcher" in kinds


def _is_stateful(loader: Any) -> bool:
    if not getattr(loader, "use_stateful_dataloader", True):  # Accelerate's, which have the methods in any case
        return False
    if lacks_its_buffer(loader) or lacks_its_buffer(getattr(loader, "dataset", None)):
        return False
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
