"""ctx.epochs and ctx.batches: loops over a script's own loaders, exact in the middle of an epoch.

    for epoch in ctx.epochs(3, model=model, optimizer=optimizer):      # lines before the batches run again, under the
        for batch in ctx.batches(loader): ...                          # generators of the epoch's top; then everything
                                                                       # is restored once more, at the first batch

A boundary comes once the next batch is known to exist; the boundary of the last batch waits for the epoch's end.
context.py calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from jobkit.data.foreign_loader import Form, Pass, draw_base, form_of, generators_of
from jobkit.data.loader import Loader
from jobkit.data.seeds import generator_state, load_generator_state
from jobkit.errors import UsageError
from jobkit.log import log
from jobkit.loop.loop import Loop
from jobkit.loop.saving import Boundary
from jobkit.loop.tracked import Tracked

_END = object()


class Epochs:
    """The epochs of one rank, and their place as a part of the checkpoint."""

    def __init__(
        self,
        loop: Loop,
        tracked: Tracked,
        restore_again: Callable[[], None],
        devices: Sequence[torch.device],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._loop, self._tracked, self._restore_again, self._devices = loop, tracked, restore_again, devices
        self._rank, self._world_size = rank, world_size
        self._ranks_before = world_size
        self._total = 0
        self._top: Any = None
        """The generators at the top of the epoch."""
        self._tracked_top: dict[str, Any] = {}
        """The tracked generators and plain values there."""
        self._bases: list[list[int]] = []
        """Of each pass in the epoch so far, of each of its loaders: the number that it was drawn from."""
        self._forms: dict[int, list[Form]] = {}
        """Of each pass, of each of its loaders: sizes that the code may change between two attempts."""
        self._passes: list[Pass] = []
        """The pass under way: one for each loader."""
        self._resumed: Mapping[str, Any] | None = None
        """The state that the attempt begins with, until the pass that was under way goes on."""
        self._forms_before: dict[int, list[Form]] = {}
        """Of passes that this attempt has not begun yet."""
        self._number = 0
        """Passes in the epoch that have begun."""
        self._is_under_way = False
        """True within a pass."""
        self._is_held = False
        """True where a step is done whose boundary has not come."""

    def state_dict(self) -> dict[str, Any]:
        if self._resumed is not None:
            return dict(self._resumed)
        return {
            "world_size": self._world_size,
            "bases": self._bases,
            "forms": {number: [tuple(form) for form in forms] for number, forms in self._forms.items()},
            "passes": [part.state_dict() for part in self._passes] if self._bases else [],
            "top": self._top,
            "tracked_top": self._tracked_top,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._top, self._bases = state["top"], state["bases"]
        self._tracked_top = dict(state.get("tracked_top", {}))
        self._forms = {number: [Form(*form) for form in forms] for number, forms in state["forms"].items()}
        self._forms_before = dict(self._forms)
        self._resumed = state if state["bases"] else None
        self._ranks_before = state["world_size"] if state["forms"] else self._world_size

    @property
    def restores_again(self) -> bool:
        """True if the attempt begins within an epoch: everything is restored once more at the first batch."""
        return self._resumed is not None

    @property
    def batch(self) -> int:
        return self._loop.boundary.batch

    @property
    def sample_ids(self) -> list[list[int]]:
        """Of each loader of the pass under way, the ids of this rank's samples in the batch under way."""
        after = not self._loop.is_in_step
        return [part.ids(max(0, part.taken - after)) for part in self._passes]

    def epochs(self, total: int) -> Iterator[int]:
        loop = self._loop
        loop.begin("ctx.epochs", None)
        if self._ranks_before != self._world_size and self._rank == 0:
            words = "the run had %d rank(s) and has %d now: a DataLoader's batches are those of a rank, so steps change"
            log.warning(words, self._ranks_before, self._world_size)
        self._total = total
        while loop.boundary.epoch < total and not self._is_at_end:
            if self._resumed is not None:
                load_generator_state(self._resumed["top"], *self._devices)
                self._tracked.set_small_state(self._tracked_top)
            self._top, self._tracked_top = generator_state(*self._devices), self._tracked.small_state()
            self._bases, self._number = [], 0
            loop.outside()
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
        self._bases, self._passes, self._top = [], [], None
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
        for name, value in self._tracked.objects.items():
            if any(value is loader for loader in loaders):  # its own place, and the pass's, would both be restored
                hint = f"leave {name}= out of ctx.epochs and ctx.track"
                if isinstance(value, Loader):
                    hint = "give it a DataLoader of your own; ctx.loader's is for ctx.steps"
                raise UsageError(f"ctx.batches keeps the place of its loader, and {name} is tracked too: {hint}")
            if any(value is generator for loader in loaders for generator in generators_of(loader)):
                raise UsageError(
                    f"ctx.batches seeds the generator of its loader for each pass, and {name} is tracked too: give the "
                    "loader a generator of its own"
                )
        for loader in loaders:
            if isinstance(loader, DataLoader) and not issubclass(type(loader), DataLoader):  # by its __class__ alone
                raise UsageError(
                    f"ctx.batches: a {type(loader).__name__}, as accelerator.prepare makes it, hides the order of the "
                    "DataLoader within it: leave the loader out of prepare, with a DistributedSampler on several ranks"
                )
        return Batches(self, loaders)

    def run(self, loaders: Sequence[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, from where the run stands."""
        number, self._number = self._number, self._number + 1
        resumed = self._resumed
        if resumed is not None and number < len(resumed["bases"]) - 1:
            self._bases.append(resumed["bases"][number])
            return  # a pass that was done before the checkpoint
        if self._is_under_way:  # zip() of two passes would count two steps for each update
            raise UsageError("ctx.batches: the pass before is not over; for two loaders write ctx.batches(a, b)")
        forms = [form_of(loader) for loader in loaders]
        before = self._forms_before.pop(number, forms)
        if len(before) != len(loaders):
            raise UsageError(f"ctx.batches: the checkpoint's pass is over {len(before)} loader(s), not {len(loaders)}")
        states: list[dict[str, Any] | None] = [None] * len(loaders)
        if resumed is None:
            self._bases.append([draw_base() for _ in loaders])
        else:
            states = [self._continued(*args) for args in zip(loaders, before, forms, resumed["passes"], strict=True)]
            self._bases.append(resumed["bases"][number])
        self._say_changes(before, forms, states)
        passes = [Pass(*args) for args in zip(loaders, self._bases[-1], states, strict=True)]
        self._forms[number] = forms
        if resumed is not None:
            # The lines before ctx.batches, and the loader's first draws, have changed what was restored.
            kept = self._bases, self._forms, self._forms_before
            self._restore_again()
            self._resumed = None
            self._bases, self._forms, self._forms_before = kept
        self._passes = passes
        lengths = [length for part in passes if (length := part.batches_left()) is not None]
        if lengths and self._loop.boundary.epoch + 1 == self._total:  # the loop saves one step before its end
            self._loop.total = self._loop.boundary.step + self._is_held + max(0, min(lengths))
        self._is_under_way = True
        try:
            yield from self._batches(loaders)
        finally:
            self._is_under_way = False
            self._loop.outside(after_step=True)

    def _continued(self, loader: Any, before: Form, now: Form, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return where a pass goes on: after as many samples, where the batch size or the number of ranks is another.

        DistributedSampler deals samples out in turn: half as many ranks have done twice as many each.
        """
        assert self._resumed is not None
        ranks, was_dealt = self._resumed["world_size"], isinstance(getattr(loader, "sampler", None), DistributedSampler)
        if before != now or ranks != self._world_size:
            state = {**state, "order": None}
        is_equal = before.batch_size == now.batch_size and (ranks == self._world_size or not was_dealt)
        if is_equal or before.batch_size is None or now.batch_size is None:
            return dict(state)
        done = state["skipped"] + state["taken"] * before.batch_size
        if was_dealt:
            done = done * ranks // self._world_size
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            return {**state, "taken": done // now.batch_size, "skipped": 0, "stream": None}
        return {**state, "taken": 0, "skipped": done}

    def _say_changes(self, before: Sequence[Form], now: Sequence[Form], states: Sequence[Any]) -> None:
        """Warn on rank 0 of sizes that the code has changed since the attempt before."""
        for old, new, state in zip(before, now, states, strict=True):
            done = 0 if state is None else state["skipped"] + state["taken"] * (new.batch_size or 1)
            consequence = f"the epoch goes on after {done} samples of each rank" if done else "it counts from here on"
            for what, was, is_now in zip(("batch size", "number of samples"), old, new, strict=True):
                if was != is_now and self._rank == 0:
                    words = "the %s of ctx.batches was %s, and is %s now: %s"
                    log.warning(words, what, was, is_now, consequence)

    def _batches(self, loaders: Sequence[Any]) -> Iterator[Any]:
        loop = self._loop
        iterators = [iter(part) for part in self._passes]
        batch = self._next(iterators)
        first_of_pass = True
        while batch is not _END:
            if first_of_pass:
                loop.begin_pass()
            if self._is_held and first_of_pass:  # the last batch of the pass before had no boundary yet
                self._end_step()
            first_of_pass = False
            loop.begin_step()
            self._is_held = True
            if loop.trace is not None:
                loop.trace.see(batch)
            yield batch[0] if len(loaders) == 1 else batch
            for part in self._passes:
                part.taken += 1
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
        if drill is not None and (done >= drill.steps or (drill.shorten and self._passes[0].taken >= drill.shorten)):
            return _END
        batches = [next(iterator, _END) for iterator in iterators]
        return _END if any(batch is _END for batch in batches) else tuple(batches)


class Batches:
    """The batches of ctx.batches: an iterable with the length of its shortest loader."""

    def __init__(self, epochs: Epochs, loaders: Sequence[Any]) -> None:
        self._epochs, self._loaders = epochs, loaders

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.run(self._loaders)

    def __len__(self) -> int:
        return min(len(loader) for loader in self._loaders)
