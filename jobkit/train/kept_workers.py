"""Workers that outlive a pass, of loaders that a script iterates over itself, as for its validation."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.train.loader_options import InitWorker
from jobkit.train.own_state import own_state, set_own_state
from jobkit.train.positions import Positions, at
from jobkit.train.tap import Draws, Tap, index_sampler, kept_draws, tapped, untapped

Record = Mapping[str, Any]
"""Of one loader whose workers had begun: what it is known by, and what they would draw next."""


class KeptWorkers:
    """Which loaders with persistent workers have begun in this run, beside those of ctx.batches.

    Such a loader draws the seed of its workers once, from the generators that the training draws from. Those of another
    attempt begin again: without moving the generators, and with what the workers before would have drawn next.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._is_in_loop = False

    def begin_loop(self) -> None:
        """Loaders that are made from here on may be made in each epoch, and draw then in each."""
        self._is_in_loop = True

    def state(self) -> list[Record]:
        """What another attempt continues from."""
        return [found for one in self._known if (found := one.record()) is not None]

    def continue_from(self, records: Sequence[Record]) -> None:
        """The run stands where `state` was taken: loaders that have begun in this attempt before it begin once more."""
        waiting = [_Known(one["name"], one["draws"]) for one in records]
        left = list(waiting)
        rest = []
        for known in self._known:
            same = next((one for one in left if one.name == known.name), None)
            if same is None:
                rest.append(known)
            else:
                left.remove(same)
                known.end()
        self._known = waiting + rest

    def watch(self) -> None:
        """Be told of the loaders of this process, from here on."""
        global _watching
        _watching = self
        if DataLoader._get_iterator is not _get_iterator:
            DataLoader._get_iterator, DataLoader.__init__ = _get_iterator, _init  # type: ignore[method-assign]

    def made(self, loader: DataLoader[Any]) -> None:
        """A loader was made."""
        if self._is_in_loop:
            vars(loader)["jobkits_is_late"] = True

    def begin(self, loader: DataLoader[Any]) -> Any:
        """The iterator of a loader whose workers are to be kept."""
        name = _name(loader)
        self._known = [one for one in self._known if not one.is_gone]  # one that was made for an epoch
        known = next((one for one in self._known if one.name == name and one.loader is None), None)
        again = known is not None
        if known is None:
            known = _Known(name, {})
            self._known.append(known)
        state, own = rng_state(), own_state(loader)

        def begun() -> None:
            if again:  # then no seed was drawn for workers
                set_rng_state(state)
                set_own_state(loader, own)

        positions = Positions(index_sampler(loader), at(0), 0, asks=True, begun=begun, at_place=bool)
        tap = Tap(loader, positions, untapped(0), known.draws)
        tap.ahead = deque(maxlen=0)  # nobody asks for its batches again
        with tapped(loader, tap):
            iterator = _torchs_get_iterator(loader)
        tap.attach(iterator)
        known.begin(loader, tap, may_be_one_epochs=not again and "jobkits_is_late" in vars(loader))
        return iterator


class _Known:
    """One loader; `loader` is None until it begins in this attempt."""

    def __init__(self, name: tuple[Any, ...], draws: Draws) -> None:
        self.name, self.draws = name, draws
        self.loader: weakref.ref[DataLoader[Any]] | None = None
        self._tap: Tap | None = None
        self._may_be_one_epochs = False

    def begin(self, loader: DataLoader[Any], tap: Tap, *, may_be_one_epochs: bool) -> None:
        self.loader, self._tap, self._may_be_one_epochs = weakref.ref(loader), tap, may_be_one_epochs

    def record(self) -> Record | None:
        """None where another attempt draws as this one did."""
        if self.loader is None:
            return {"name": self.name, "draws": self.draws}
        loader = self._live()
        if loader is None or (self._may_be_one_epochs and self._tap and not self._tap.positions.is_left):
            return None
        return {"name": self.name, "draws": kept_draws(loader) or {}}

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the loader any more."""
        return self.loader is not None and self.loader() is None

    def end(self) -> None:
        """End its workers, for others to begin."""
        if (loader := self._live()) is not None:
            loader._iterator = None

    def _live(self) -> DataLoader[Any] | None:
        """The loader, where its workers are kept and ctx.batches does not know of them."""
        loader = None if self.loader is None else self.loader()
        if loader is None or getattr(loader._iterator, "jobkits_tap", None) is not self._tap:
            return None
        return loader


def _name(loader: DataLoader[Any]) -> tuple[Any, ...]:
    try:
        length = len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # the user's own code
        length = None
    return type(loader.dataset).__qualname__, length, loader.batch_size, loader.num_workers


_watching: KeptWorkers | None = None
_torchs_get_iterator, _torchs_init = DataLoader._get_iterator, DataLoader.__init__


@functools.wraps(_torchs_get_iterator)
def _get_iterator(self: DataLoader[Any]) -> Any:
    is_kept = self.persistent_workers and self.num_workers > 0
    is_jobkits = "_get_iterator" in vars(self) or isinstance(self.worker_init_fn, InitWorker)
    if _watching is None or not is_kept or is_jobkits:
        return _torchs_get_iterator(self)
    return _watching.begin(self)


@functools.wraps(_torchs_init)
def _init(self: DataLoader[Any], *arguments: Any, **options: Any) -> None:
    _torchs_init(self, *arguments, **options)
    if _watching is not None:
        _watching.made(self)
