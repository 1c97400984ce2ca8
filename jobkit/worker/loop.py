"""The training loop: it yields steps, and between two of them the ranks agree on checkpoints and stops."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.state import seed_device, set_rng_state
from jobkit.errors import CheckpointError, UsageError
from jobkit.run.events import Event
from jobkit.run.slots import StepMark
from jobkit.train.engine import Engine
from jobkit.train.modes import Now
from jobkit.train.seeds import derive_seed, seed_generators
from jobkit.worker.checkpointing import Checkpoints
from jobkit.worker.fingerprint import Fingerprint, StateWatch
from jobkit.worker.heartbeat import peak_bytes
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.stop import CauseFinder, Stopped
from jobkit.worker.stragglers import StragglerMonitor
from jobkit.worker.timing import StepTimer
from jobkit.worker.tracked_state import LOSS_SCALE, TrackedState
from jobkit.worker.untracked import SteppingOptimizers


class TrainingLoop:
    """The loop of one rank; `restored` is the checkpoint that the attempt begins with, `finder` is asked on rank 0."""

    def __init__(
        self,
        rank: Rank,
        engine: Engine,
        tracked: TrackedState,
        restored: RestoredCheckpoint | None,
        checkpoints: Checkpoints,
        reporter: RunReporter,
        finder: CauseFinder,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = restored.step if restored is not None else 0
        """The step the loop is in, from 0; after the loop, the number of steps done."""
        self.total: int | None = None
        """None before the loop."""
        self.stopped: Stopped | None = None
        self._rank, self._engine, self._tracked, self._restored = rank, engine, tracked, restored
        self._checkpoints, self._reporter = checkpoints, reporter
        self._schedule, self._memory_schedule = checkpoints.schedule, checkpoints.memory_schedule
        self._signals, self._finder = finder.signals, finder
        self.stragglers = StragglerMonitor(rank, reporter)
        self._timer = StepTimer()
        self._mark = StepMark(os.environ, rank.attempt)
        self._on_first_step = on_first_step
        self._optimizer_steps = 0
        self._stepping: SteppingOptimizers | None = None
        self.is_in_step = False
        self._watch = StateWatch(rank.devices)
        self._step_start: Fingerprint | None = None
        """The state that the step under way began with; None where it is not known."""
        self._modes: dict[str, Now] | None = None
        """Those that it began with: an evaluation changes them, and maybe back. None between two steps."""
        self._evaluated_at: deque[int] = deque(maxlen=2)
        """The last steps that evaluated something."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        def count(*_: Any) -> None:
            self._optimizer_steps += 1

        optimizer.register_step_post_hook(count)
        self._engine.watch(optimizer)

    def steps(self, total: int) -> Iterator[int]:
        is_continued = self._restored is not None
        self._begin(total)
        first = self.step
        self._stepping = SteppingOptimizers()
        while self.step < total:
            self._step_start = self._watch.take_if_cheap(evaluation_expected=self._expects_evaluation())
            self._modes = self._tracked.modes() if self._step_start is not None else None
            self.is_in_step = True
            self.stragglers.timer.begin()
            yield self.step
            self.stragglers.timer.end()
            self._modes = None
            self.step += 1
            if self._stepping is not None and self._stepping.check(self._all_tracked()):
                self._stepping = None
            if self._optimizer_steps:
                self._engine.check_updated(is_continued=is_continued)
            self._engine.average_replicas(self.step, self._of_type(torch.optim.Optimizer), is_last=self.step == total)
            self._mark.set(self.step)
            self._reporter.heartbeat.beat()
            if self.step == first + 1:
                self._checkpoints.check_state()  # whatever makes ranks differ, as a seed by rank, has done so by now
                self._reporter.record_soon(Event.STEPPED)
                self._on_first_step()
            self._reporter.end_step(self.step - 1)  # before the boundary: a checkpoint there marks where curves end
            self._boundary()
        self.is_in_step = False
        if self._stepping is not None:
            self._stepping.end()
        self._reporter.heartbeat.end()

    def _all_tracked(self) -> list[Any]:
        return [*self._tracked.objects.values(), *self._tracked.own_objects.values()]

    def _of_type(self, kind: type[Any]) -> list[Any]:
        return [value for value in self._tracked.objects.values() if isinstance(value, kind)]

    # The beginning

    def _begin(self, total: int) -> None:
        if self.total is not None:
            raise UsageError("ctx.steps is called once in a run: a second loop would not know where it was resumed")
        self._engine.check_tracked(self._all_tracked())
        self._tracked.check_unchanged()
        self.total = total
        if self._engine.scaler is not None:
            self._tracked.add(LOSS_SCALE, self._engine.scaler)
        restored = self._restored
        self._tracked.begin_modes()
        self._tracked.restore_gradients()
        if missing := self._tracked.forget_checkpoint():
            raise CheckpointError(
                f"{restored and restored.name} has {', '.join(missing)}, which the code no longer tracks; "
                "call ctx.track with it before ctx.steps, or submit with --fresh"
            )
        self._record_resumed(total)
        self._continue_local_state()
        self._watch.track(self._all_tracked())
        self._restored = None  # its tensors are in the model by now
        self.report_progress()
        self._timer.start(self.step)
        self._reporter.heartbeat.begin()
        self._schedule.restart()
        self._memory_schedule.restart()

    def _record_resumed(self, total: int) -> None:
        began: dict[str, Any] = {"checkpoint": None}
        joined = round(self._rank.joined, 3)
        if (restored := self._restored) is not None and restored.snapshot is None:
            began = {"checkpoint": restored.name}
        elif restored is not None:
            began = {"memory": True, "durable_step": restored.durable_step}
        self._reporter.record(Event.RESUMED, step=self.step, total_steps=total, joined=joined, **began)

    def _continue_local_state(self) -> None:
        """Random numbers, and what else differs from rank to rank: as they were, or as on a new rank."""
        restored, parallel = self._restored, self._engine.parallel
        world_size = self._rank.topology.world_size
        same_world = restored is not None and restored.manifest.world_size == world_size
        seed = derive_seed(self._rank.config.seed, "train", parallel.data_rank, self.step)  # dropout differs by share
        # Ranks that compute the same samples draw the same numbers, which those of another layout may not have done.
        if restored is not None and restored.local is not None and (same_world or parallel.layout.data == world_size):
            for device in set_rng_state(restored.local["rng"], *self._rank.devices):
                seed_device(device, seed)  # it was on other devices before, as on the CPU
        else:
            seed_generators(seed, *self._rank.devices)
        if restored is not None and restored.local is not None and same_world:
            self._tracked.load_own_state(restored.local)

    # Between two steps

    def _boundary(self) -> None:
        if self.step == self.total:
            return  # whatever it is, finishing is the quickest answer to it
        due = self._schedule.is_due_after(self.step)
        # What the function does after the loop may need the last step's values, and may be killed: then that one step
        # is repeated. The final checkpoint comes with the function's result.
        due = due or self.step + 1 == self.total
        in_memory = self._memory_schedule.is_due_after(self.step)
        alone = self._rank.topology.world_size == 1  # whose signals nobody else has to hear of
        if self._timer.agree_at <= self.step or (alone and self._signals.pending):
            by_time, in_memory_by_time = self._agree()
            due, in_memory = due or by_time, in_memory or in_memory_by_time
        if due:
            self._checkpoints.save(self.step)
        elif in_memory:
            self._checkpoints.snapshot(self.step)
        self.report_progress()

    def _agree(self) -> tuple[bool, bool]:
        """Exchange what only some ranks know, and stop where one was told to.

        Whether the clock asks for a checkpoint, and whether for a snapshot in memory.
        """
        main, seconds = self._rank.is_main, self._timer.measure(self.step)
        told, by_time, in_memory, slowest, peak, compare = self._rank.group.maximum(
            self._signals.pending,
            main and self._schedule.is_due_by_time(),
            main and self._memory_schedule.is_due_by_time(),
            seconds,
            peak_bytes(),
            self.stragglers.is_due(),
        )
        self._reporter.update(peak_bytes=int(peak))
        self._timer.agree_after(self.step, slowest)
        if told:
            self.stop_if_told()
        if compare:
            self.stragglers.compare(self.step)
        self._log_performance()
        return bool(by_time), bool(in_memory)

    def stop_if_told(self) -> None:
        """On all ranks, after a signal on one: ask why, and unless it was a false alarm save and raise Stopped."""
        cause = self._rank.group.broadcast(self._finder.find() if self._rank.is_main else None)
        if cause is None:
            self._signals.clear()
            return
        # For the watchdog: from here on only the last checkpoint counts, within what Slurm leaves before SIGKILL.
        self._reporter.heartbeat.stopping = True
        self._engine.end_averaged()
        self._tracked.buffers.end()
        if self._checkpoints.durable_step != self.step and self.total is not None:
            self._tracked.modes_of_save = self._modes
            self._checkpoints.save(self.step, wait=True, must=False)
        durable = self._checkpoints.durable_step
        self._reporter.record(Event.INTERRUPTED, cause=cause, step=durable or 0, reached=self.step)
        kept = "its checkpoint is safe" if durable == self.step else "no checkpoint of it"
        self._reporter.say(f"stopped at step {self.step}, {kept}; the same command continues the run")
        self.stopped = Stopped(str(cause), self.step, durable)
        raise self.stopped

    def _log_performance(self) -> None:
        seconds = self._timer.sample(self.step)
        if seconds is None:
            return
        values: dict[str, Any] = {"perf/step_seconds": seconds}
        for loader in self._engine.loaders[:1]:
            values["perf/samples_per_second"] = loader.global_batch_size / seconds
            values["perf/epoch"] = loader.epoch
        for optimizer in self._of_type(torch.optim.Optimizer)[:1]:
            values["train/lr"] = optimizer.param_groups[0]["lr"]
        self._reporter.scalars(self.step - 1, values)

    def report_progress(self) -> None:
        self._reporter.update(step=self.step, total_steps=self.total, steps_per_second=self._timer.steps_per_second)

    # Within a step

    def may_stop_here(self) -> bool:
        """Whether the step has changed nothing that a checkpoint would hold; before the loop there is none."""
        if not self.is_in_step:
            return self.total is None  # after the loop, going on to the end is what is left to do
        return self._step_start is not None and self._step_start == self._watch.take()

    @contextmanager
    def unchanged_by(self, swap: AbstractContextManager[None]) -> Iterator[None]:
        """Within `swap`, which at its end puts back what it changes: the step's state is what it was before."""
        unchanged = self.may_stop_here()
        with swap:
            self._look_again(unchanged)
            yield
            unchanged = self.may_stop_here()
        self._look_again(unchanged)

    def _look_again(self, unchanged: bool) -> None:
        if self.is_in_step:
            self._step_start = self._watch.take() if unchanged else None

    def evaluated(self) -> None:
        """An evaluation took part of the step: the next step's end is one to agree at, and own time begins again."""
        if self.step not in self._evaluated_at:
            self._evaluated_at.append(self.step)
        self._timer.agree_at = self.step + 1
        self.stragglers.timer.begin()  # in there the ranks waited for each other

    def _expects_evaluation(self) -> bool:
        """Whether this step is as far from the last one that evaluated as that was from the one before."""
        if len(self._evaluated_at) < 2:
            return False
        before, last = self._evaluated_at
        return self.step - last == last - before
