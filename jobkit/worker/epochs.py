"""ctx.epochs and ctx.batches: a script's own loop over its own loaders, each batch a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.utils.data import DistributedSampler

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.errors import CheckpointError, UsageError
from jobkit.log import log
from jobkit.train.data import Loader
from jobkit.train.known_loaders import KnownLoaders
from jobkit.train.loader_pass import LoaderPass
from jobkit.train.tracked_generator import TrackedGenerator
from jobkit.worker.caller import CallerLoop, frame_of_script
from jobkit.worker.forgotten import ForgottenValues, frames_around, is_used_after
from jobkit.worker.loop import TrainingLoop
from jobkit.worker.rank import Rank
from jobkit.worker.state_names import EPOCHS
from jobkit.worker.tracked_state import TrackedState

_LOOK_AFTER = (1, 5)
"""Batches of a pass after which the script's variables are compared: some change in each, some seldom."""


class Epochs:
    """Where one rank stands in its epochs. `restored` is the checkpoint that the attempt begins with."""

    def __init__(
        self, rank: Rank, loop: TrainingLoop, tracked: TrackedState, restored: RestoredCheckpoint | None
    ) -> None:
        self.epoch = 0
        self.batch = 0
        """Batches handed out in the newest ctx.batches of the epoch."""
        self._rank, self._loop, self._tracked = rank, loop, tracked
        self._call = 0
        """Of ctx.batches in this epoch: those before it are done."""
        self._calls = 0
        """How many the script has made in this epoch, in this attempt."""
        self._passes: list[LoaderPass] = []
        """Those under way."""
        self._open: weakref.ref[Generator[Any, None, None]] | None = None
        """The batches of the newest ctx.batches, as long as the script holds them."""
        self._batch_is_open = False
        """Whether a batch was handed out whose step has not ended."""
        self._total = 0
        self._lengths: dict[int, int] = {}
        self._top: dict[str, Any] = {}
        """The random numbers that the epoch began with."""
        self._top_workers: list[Any] = []
        """The workers that were kept from the epochs before."""
        self._loaders: dict[int, KnownLoaders] = {}
        self._sampler_epochs: dict[int, list[int]] = {}
        self._has_told_order = self._has_told_lost = False
        self._told: set[str] = set()
        """The variables of which was said that no checkpoint has them."""
        self._resume: _Resume | None = None
        if restored is not None and EPOCHS in restored.manifest.extra:
            self._continue(restored)

    def _continue(self, restored: RestoredCheckpoint) -> None:
        now, before = self._rank.topology.world_size, restored.manifest.world_size
        known = restored.manifest.extra[EPOCHS]
        if before == now and restored.local is not None and EPOCHS in restored.local:
            known = restored.local[EPOCHS]
        self.epoch, self._call = known["epoch"], known["call"]
        self._loaders = {int(call): KnownLoaders(of_one) for call, of_one in known.get("loaders", {}).items()}
        taken = known["batch"] if before == now else known["batch"] * before // now
        passes = known.get("passes") or [{"taken": taken}]
        if taken or self._call:
            self._resume = _Resume(restored, self._call, taken, passes, known.get("top"), known.get("top_workers", ()))
        if before != now and self._rank.is_main:
            log.info(
                "the checkpoint was written by %d rank(s), and %d are here: epoch %d goes on after %d batches of each "
                "rank. With a DistributedSampler and set_epoch the samples are those that are left, but for up to a "
                "batch; where the order comes from random numbers, some come twice in this epoch and others not",
                before,
                now,
                self.epoch,
                taken,
            )

    def state(self) -> dict[str, Any]:
        """This rank's own part of the checkpoint."""
        is_mid = bool(self._passes)
        return {
            **self.entry(),
            "passes": [one.state() for one in self._passes] if is_mid else [],
            "top": self._top if is_mid or self._call else {},
            "top_workers": self._top_workers,
            "loaders": {
                call: known.state(is_between=not is_mid or call != self._call) for call, known in self._loaders.items()
            },
        }

    def entry(self) -> dict[str, Any]:
        """What the manifest has of it."""
        return {"epoch": self.epoch, "call": self._call, "batch": self._passes[0].taken if self._passes else 0}

    # The epochs

    def epochs(self, total: int) -> Iterator[int]:
        """Yield epochs up to `total`, from the one in which the run stands."""
        self._total = total
        self._loop.check_left(self.epoch, total)
        self._loop.begin(None)
        first = self.epoch
        variables = self._variables_of(frames_around(frame_of_script()))
        for epoch in range(first, total):
            for seen in variables if epoch > first else ():
                seen.tell(self._told, "an attempt that goes on in a later epoch begins with what was before them")
            self._calls, self.batch = 0, 0
            devices = self._rank.devices
            if self._resume is not None:
                if self._resume.top:
                    set_rng_state(self._resume.top, *devices)  # what is drawn before the loader, is drawn again
                    self._tracked.kept_workers.continue_from(self._resume.top_workers)
                self._resume.fingerprint = self._loop.fingerprint()
            self._top, self._top_workers = rng_state(*devices), self._tracked.kept_workers.state()
            self._loop.begin_step()
            yield epoch
            self._end_open_batch()
            if self._open is not None and (run := self._open()) is not None:
                run.close()  # one that is read by next() may not have been asked for its end
            if self._resume is not None:
                raise CheckpointError(
                    f"epoch {epoch} was left in its ctx.batches number {self._resume.call + 1}, which the code no "
                    "longer calls: undo that, or submit with --fresh"
                )
            self.epoch, self._call, self._loop.is_held = epoch + 1, 0, False
            if self._calls == 0:
                self._tell_whole_epochs(epoch == first)
                self._loop.end_step()
            else:
                self._loop.end_epoch(is_last=epoch + 1 == total)
        self._loop.end()

    def _variables_of(self, frames: list[FrameType]) -> list[ForgottenValues]:
        is_main, tracked = self._rank.is_main, self._tracked.all_objects
        return [ForgottenValues(frame, tracked) for frame in frames] if is_main else []

    def _tell_whole_epochs(self, is_first: bool) -> None:
        if is_first and self._rank.is_main:
            log.info(
                "an epoch is one step here, and a stop waits for its end: `for batch in ctx.batches(loader)` makes "
                "each batch one"
            )

    # The batches

    def begin_batches(self, loaders: tuple[Any, ...]) -> Batches:
        """What ctx.batches returns."""
        if not self._loop.has_begun or self._loop.is_over:
            raise UsageError("ctx.batches belongs into `for epoch in ctx.epochs(n, model=model, ...):`")
        if not loaders:
            raise UsageError("ctx.batches needs a loader, as in ctx.batches(train_loader)")
        for loader in loaders:
            if isinstance(loader, Loader):
                raise UsageError("ctx.batches: a loader of ctx.loader has no end: take `for step in ctx.steps(n)`")
            if isinstance(loader, Iterator):
                raise UsageError(
                    f"ctx.batches: a {type(loader).__name__} can be read once only, and not again in another attempt: "
                    "give what it was made of, as the DataLoader"
                )
        self._end_open_batch()
        if self._passes:
            raise UsageError("ctx.batches within ctx.batches: for two loaders at once, ctx.batches(one, other)")
        place = CallerLoop(frame_of_script())
        if (counting := place.counting_around) is not None:
            raise UsageError(f"{place.where}: {counting}")
        if place.gathers:
            raise UsageError(
                f"{place.where}: ctx.batches in a comprehension: what it has gathered is lost when an epoch is "
                "continued in its middle. Write a `for` loop, and gather into ctx.values or a tracked object"
            )
        call, self._calls = self._calls, self._calls + 1
        if self._loop.is_held:
            self._tell_lost_variables()
        with suppress(TypeError):  # a stream has no length
            self._lengths[call] = min(len(loader) for loader in loaders)
            self._loop.shown_total = self._total * sum(self._lengths.values())
        resume = self._resume
        if resume is not None and call < resume.call:
            self.batch = 0
            if call + 1 == resume.call and resume.taken == 0:
                self._end_resume(resume)
            return Batches(lambda: iter(()), loaders)
        self.batch = 0 if resume is None else resume.taken
        return Batches(lambda: self._opened(self._run(call, loaders)), loaders)

    def _opened(self, run: Generator[Any, None, None]) -> Iterator[Any]:
        self._open = weakref.ref(run)
        return run

    def _run(self, number: int, loaders: tuple[Any, ...]) -> Generator[Any, None, None]:
        """The batches of one ctx.batches call."""
        frame = frame_of_script()
        place = CallerLoop(frame)
        if place.counting is not None:
            raise UsageError(f"{place.where}: {place.counting}")
        frames = frames_around(frame)
        loops = [CallerLoop(one) for one in frames]
        variables = self._variables_of(frames)
        self._loop.is_held = False
        resume, self._resume = self._resume, None
        known = self._loaders.get(number)
        if resume is not None:
            self._end_resume(resume)
        if known is None:
            known = self._loaders[number] = KnownLoaders()
        tracked = [one.generator for one in self._tracked.all_objects() if isinstance(one, TrackedGenerator)]
        draws = known.begin(loaders, is_continued=resume is not None, tracked=tracked)
        self._tell_same_order(number, loaders)
        states: list[Any] = list(resume.passes) if resume is not None else [None] * len(loaders)
        if len(states) != len(loaders):
            raise CheckpointError(f"ctx.batches: the checkpoint has {len(states)} loader(s) here, {len(loaders)} are")
        self._call = number
        self._passes = [
            LoaderPass(loader, state, draws=kept) for loader, state, kept in zip(loaders, states, draws, strict=True)
        ]
        rounds = 0
        try:
            while True:
                try:
                    batches = [next(one) for one in self._passes]
                except StopIteration:
                    break
                self.batch = self._passes[0].taken - 1
                self._loop.begin_step()
                self._batch_is_open = True
                yield batches[0] if len(batches) == 1 else tuple(batches)
                self._batch_is_open = False
                self.batch = self._passes[0].taken
                self._loop.end_step(stays=self._is_last(loaders))
                rounds += 1
                for seen in variables if rounds in _LOOK_AFTER else ():
                    seen.tell(self._told, "an attempt that goes on here begins with what the lines above set")
        finally:
            self._call, self._passes = number + 1, []
        tracked_now = self._tracked.all_objects()
        self._loop.is_held = any(is_used_after(loop, one, tracked_now) for loop, one in zip(loops, frames, strict=True))
        self._loop.begin_step()  # what follows the last batch

    def _is_last(self, loaders: tuple[Any, ...]) -> bool:
        """Whether no batch is left: what follows may need what the script's loop has set, and is to run with it."""
        with suppress(TypeError):
            return self.batch >= min(len(loader) for loader in loaders)
        return False

    def _tell_lost_variables(self) -> None:
        if self._rank.is_main and not self._has_told_lost:
            self._has_told_lost = True
            log.warning(
                "epoch %d has several loops of ctx.batches, and what the first has set is used after it: an attempt "
                "that goes on in a later one does not have it, and may fail there; keep it in ctx.values, or make one "
                "loop of them: ctx.batches(one, other)",
                self.epoch,
            )

    def leave(self) -> None:
        """The loops have been left for good, maybe in the middle of a batch, which counts: for the end of the run."""
        if self._batch_is_open:
            self._batch_is_open = False
            self._loop.count_step()

    def _tell_same_order(self, number: int, loaders: tuple[Any, ...]) -> None:
        """Say once that a DistributedSampler was not told the epoch: as without jobkit, its order is the same then."""
        samplers: list[Any] = [getattr(loader, "sampler", None) for loader in loaders]
        epochs = [one.epoch for one in samplers if _shuffles(one)]
        if epochs and epochs == self._sampler_epochs.get(number) and self._rank.is_main and not self._has_told_order:
            self._has_told_order = True
            log.warning(
                "the DistributedSampler's epoch is %d in epoch %d, as in the one before: every epoch has the same "
                "order; call loader.sampler.set_epoch(epoch) before ctx.batches(loader)",
                epochs[0],
                self.epoch,
            )
        self._sampler_epochs[number] = epochs

    def _end_open_batch(self) -> None:
        """The step of a batch that the loop was left in, by `break`; what follows the loop may have run by now."""
        if self._batch_is_open:
            self._batch_is_open = False
            self._loop.end_step(stays=True)

    def _end_resume(self, resume: _Resume) -> None:
        """From here on it goes on where it stood: what it has done since the top of the epoch, it had done before."""
        self._resume = None
        self._loop.restore_again(resume.restored, resume.fingerprint)


class Batches:
    """The batches of loaders, each a step."""

    def __init__(self, run: Callable[[], Iterator[Any]], loaders: tuple[Any, ...]) -> None:
        self._run, self._loaders = run, loaders
        self._has_run = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_run:
            raise UsageError("ctx.batches is called for each pass over the loader: one was made already")
        self._has_run = True
        return self._run()

    def __len__(self) -> int:
        """Batches of the whole pass, as the loader's length."""
        return min(len(loader) for loader in self._loaders)


class _Resume:
    """The middle of an epoch, in which an attempt begins."""

    def __init__(
        self,
        restored: RestoredCheckpoint,
        call: int,
        taken: int,
        passes: list[Mapping[str, Any]],
        top: Mapping[str, Any] | None,
        top_workers: Sequence[Any],
    ) -> None:
        self.restored, self.call, self.taken, self.passes, self.top = restored, call, taken, passes, top
        self.top_workers = top_workers
        self.fingerprint: Any = None
        """Of the state at the top of the epoch."""


def _shuffles(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) and sampler.shuffle
