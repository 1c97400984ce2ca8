"""ctx.epochs and ctx.batches: loops over a script's own loaders, exact in the middle of an epoch.

    for epoch in ctx.epochs(3, model=model, optimizer=optimizer):      # lines before the batches run again, under the
        for batch in ctx.batches(loader): ...                          # generators of the epoch's top; then everything
                                                                       # is restored once more, at the first batch

A boundary comes once the next batch is known to exist; the boundary of the last batch waits for the epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from jobkit.errors import UsageError
from jobkit.log import log
from jobkit.train.foreign_loader import Pass, draw_base
from jobkit.train.seeds import generator_state, load_generator_state
from jobkit.worker.checkpoints import Boundary
from jobkit.worker.loop import Loop

_END = object()


class Epochs:
    """The epochs of one rank, and their place as a part of the checkpoint."""

    def __init__(
        self,
        loop: Loop,
        restore_again: Callable[[], None],
        devices: tuple[torch.device, ...],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._loop, self._restore_again, self._devices = loop, restore_again, devices
        self._rank, self._world_size = rank, world_size
        self._total = 0
        self._top: Any = None
        """The generators at the top of the epoch."""
        self._bases: list[list[int]] = []
        """Of each pass in the epoch so far, of each of its loaders: the number that it was drawn from."""
        self._sampler_states: list[Any] = []
        """Of the pass under way."""
        self._taken = 0
        """Batches of the pass under way that are done."""
        self._resumed: Mapping[str, Any] | None = None
        self._number = 0
        """Passes in the epoch that have begun."""
        self._is_held = False
        """True where a step is done whose boundary has not come."""
        self._passes: list[Pass] = []
        self._batch_sizes: list[int | None] = []
        """Of the loaders of the pass under way."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": self._taken,
            "world_size": self._world_size,
            "batch_sizes": self._batch_sizes,
            "bases": self._bases,
            "sampler_states": self._sampler_states,
            "top": self._top,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken, self._top = state["taken"], state["top"]
        self._bases, self._sampler_states = state["bases"], state["sampler_states"]
        self._batch_sizes = state["batch_sizes"]
        self._resumed = state if state["bases"] else None

    @property
    def restores_again(self) -> bool:
        """True if the attempt begins within an epoch: everything is restored once more at the first batch."""
        return self._resumed is not None

    @property
    def batch(self) -> int:
        return self._loop.boundary.batch

    @property
    def sample_ids(self) -> list[int]:
        """The ids of this rank's samples in the batch under way."""
        number = max(0, self._taken - (not self._loop.is_in_step))
        return [sample for part in self._passes for sample in part.ids(number)]

    def epochs(self, total: int) -> Iterator[int]:
        loop = self._loop
        loop.begin("ctx.epochs", None)
        self._total = total
        while loop.boundary.epoch < total and not self._is_at_end:
            if self._resumed is not None:
                load_generator_state(self._resumed["top"], *self._devices)
            self._top = generator_state(*self._devices)
            self._bases, self._number, self._taken = [], 0, 0
            try:
                yield loop.boundary.epoch
            except GeneratorExit:
                loop.leave(Boundary(loop.boundary.step + self._is_held, loop.boundary.epoch))
                raise
            self._end_epoch()
        loop.end()

    @property
    def _is_at_end(self) -> bool:
        """True where the run of a verification has taken its steps."""
        drill = self._loop.drill
        return drill is not None and self._loop.boundary.step >= drill.steps

    def _end_epoch(self) -> None:
        loop = self._loop
        if self._resumed is not None:
            raise UsageError("the run continues within an epoch, and its body called no ctx.batches")
        epoch = loop.boundary.epoch + 1
        self._bases, self._sampler_states, self._taken, self._top = [], [], 0, None
        step = loop.boundary.step + self._is_held
        self._is_held = False
        at_end = loop.drill is not None and step >= loop.drill.steps
        loop.end_step(Boundary(step, epoch), is_last=epoch == self._total or at_end)

    def batches(self, loaders: Sequence[Any]) -> Batches:
        """Return the batches of a pass. Raises UsageError outside ctx.epochs."""
        if self._loop.call != "ctx.epochs" or self._loop.is_over:
            raise UsageError("ctx.batches: call it in the body of `for epoch in ctx.epochs(n, model=..., ...)`")
        if not loaders:
            raise UsageError("ctx.batches: give it a DataLoader")
        return Batches(self, loaders)

    def run(self, loaders: Sequence[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, from where the run stands."""
        number, self._number = self._number, self._number + 1
        resumed = self._resumed
        if resumed is not None and number < len(resumed["bases"]) - 1:
            self._bases.append(resumed["bases"][number])
            return  # a pass that was done before the checkpoint
        first, states = 0, [None] * len(loaders)
        sizes = [getattr(loader, "batch_size", None) for loader in loaders]
        if resumed is not None:
            self._bases.append(resumed["bases"][number])
            first, states = self._done_here(loaders, sizes, resumed), resumed["sampler_states"]
        else:
            self._bases.append([draw_base() for _ in loaders])
        self._passes = [
            Pass(loader, base, first, state)
            for loader, base, state in zip(loaders, self._bases[-1], states, strict=True)
        ]
        self._sampler_states = [part.sampler_state for part in self._passes]
        self._batch_sizes = sizes
        if resumed is not None:
            # The lines before ctx.batches, and the loader's first draws, have changed what was restored.
            self._resumed = None
            bases, passes, states = self._bases, self._passes, self._sampler_states
            self._restore_again()
            self._resumed = None
            self._bases, self._passes, self._sampler_states, self._batch_sizes = bases, passes, states, sizes
        self._taken = first
        self._expect_last(loaders, first)
        yield from self._each(loaders)

    def _done_here(self, loaders: Sequence[Any], sizes: Sequence[int | None], resumed: Mapping[str, Any]) -> int:
        """Return how many batches of the pass under way are done, for this number of ranks.

        DistributedSampler deals samples out in turn: half as many ranks have done twice as many batches of a size.
        """
        taken, before = resumed["taken"], resumed["world_size"]
        if before == self._world_size:
            return int(taken)
        samplers = [getattr(loader, "sampler", None) for loader in loaders]
        old, new = resumed["batch_sizes"][0], sizes[0]
        dealt = all(isinstance(sampler, DistributedSampler) for sampler in samplers) and bool(old and new)
        first = taken * before * (old or 1) // (self._world_size * (new or 1)) if dealt else taken
        if self._rank == 0:
            done = f"its first {first} batches count as done on each" if dealt else "its samples are no longer exact"
            log.warning("the epoch goes on with %d instead of %d ranks: %s", self._world_size, before, done)
        return int(first)

    def _expect_last(self, loaders: Sequence[Any], first: int) -> None:
        """Tell the loop where the last epoch ends, as far as lengths are known: it saves one step before."""
        lengths = [length for length in map(length_of, loaders) if length is not None]
        if lengths and self._loop.boundary.epoch + 1 == self._total:
            self._loop.total = self._loop.boundary.step + self._is_held + min(lengths) - first

    def _each(self, loaders: Sequence[Any]) -> Iterator[Any]:
        loop = self._loop
        iterators = [iter(part) for part in self._passes]
        batch = self._next(iterators)
        first_of_pass = True
        while batch is not _END:
            if self._is_held and first_of_pass:  # the last batch of the pass before had no boundary yet
                self._end_step()
            first_of_pass = False
            loop.begin_step()
            self._is_held = True
            yield batch[0] if len(loaders) == 1 else batch
            self._taken += 1
            loop.own_time.begin(is_step=False)
            batch = self._next(iterators)
            loop.own_time.ends()
            if batch is not _END:
                self._end_step()

    def _end_step(self) -> None:
        boundary = self._loop.boundary
        self._is_held = False
        self._loop.end_step(Boundary(boundary.step + 1, boundary.epoch, boundary.batch + 1))

    def _next(self, iterators: Sequence[Iterator[Any]]) -> Any:
        """Return the next batch of each loader, as a tuple; _END where one of them has no more."""
        drill, done = self._loop.drill, self._loop.boundary.step + self._is_held
        if drill is not None and (done >= drill.steps or (drill.shorten and self._taken >= drill.shorten)):
            return _END
        batches = [next(iterator, _END) for iterator in iterators]
        return _END if any(batch is _END for batch in batches) else tuple(batches)


def length_of(loader: Any) -> int | None:
    """Return a loader's number of batches; None where its sampler has no length, or for the guess of a stream."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


class Batches:
    """The batches of ctx.batches: an iterable with the length of its shortest loader."""

    def __init__(self, epochs: Epochs, loaders: Sequence[Any]) -> None:
        self._epochs, self._loaders = epochs, loaders

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.run(self._loaders)

    def __len__(self) -> int:
        return min(len(loader) for loader in self._loaders)
