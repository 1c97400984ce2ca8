"""The training loop of one rank: what happens between two steps, and nothing else.

    ctx.steps, ctx.batches, ctx.boundary --end_step(boundary)--> beat, curves
        --now and then--> agreement of all ranks (agreement.py) --> save, snapshot, stop, or the error of a bad loss
        --every=--> the functions that are due at this boundary

A boundary without an agreement costs a few microseconds. `Stopped` is raised on all ranks together, once the last
checkpoint is durable. context.py and epochs.py call it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from jobkit.checkpoint.checkpointer import Pending
from jobkit.errors import Stopped, UsageError
from jobkit.log import log
from jobkit.loop.agreement import Decision, Wish, decide
from jobkit.loop.health import Health, NotFinite
from jobkit.loop.own_time import OwnTime
from jobkit.loop.rank import Rank
from jobkit.loop.reporter import Reporter, as_number
from jobkit.loop.saving import Boundary, SaveSchedule
from jobkit.loop.timing import Timing
from jobkit.loop.trace import Trace
from jobkit.loop.tracked import Tracked
from jobkit.run.records import InterruptionKind
from jobkit.wire.group import RankGroup
from jobkit.wire.pages import Phase
from jobkit.wire.signals import take_stop_signals_again

Call = Callable[[], Any]
Every = Mapping[Call, int]
"""Functions and their intervals in steps: `ctx.steps(total, every={validate: 500})`."""


class Loop:
    """The loop of one rank."""

    def __init__(
        self,
        rank: Rank,
        ranks: RankGroup,
        tracked: Tracked,
        checkpoints: SaveSchedule,
        reporter: Reporter,
        health: Health,
        timing: Timing,
        own_time: OwnTime,
        *,
        on_begin: Callable[[], None],
    ) -> None:
        restored = checkpoints.checkpointer.restored
        self.boundary = Boundary() if restored is None else checkpoints.begin_with(restored.manifest.extra)
        """Where the run stands."""
        self.call = ""
        """The call that drives the loop, as `ctx.steps`; empty before it begins."""
        self.total: int | None = None
        self.is_in_step = False
        self.is_over = False
        self.stopped: Stopped | None = None
        self.last_values: dict[str, float] = {}
        """Results of the `every=` functions after the last step: the last checkpoint's metrics."""
        self.own_time = own_time
        self.drill = rank.run.drill()
        self.trace = Trace(rank, tracked) if self.drill is not None else None
        self._rank, self._ranks, self._tracked = rank, ranks, tracked
        self._checkpoints, self._reporter, self._health, self._timing = checkpoints, reporter, health, timing
        self._on_begin = on_begin
        self._ordinal = 0
        self._agree_at = 0
        self._pending: Pending | None = None
        """The copy of the state at this boundary, while functions run that a stop may interrupt."""
        self._is_alone = ranks.world_size == 1
        self.before_boundary: Callable[[int, bool], None] | None = None
        """Called with the steps done, and whether they are all, before each boundary: local SGD averages."""

    # The beginning and the end

    def begin(self, call: str, total: int | None) -> None:
        """Begin the loop. Raises UsageError if there was one before."""
        if self.call:
            raise UsageError(f"{call}: a run has one loop, and {self.call} has begun it already")
        take_stop_signals_again()
        self._check_stopped()
        self.call = call
        if self.drill is not None and total is not None:
            total = min(total, self.drill.steps)
        self.total = total
        self._on_begin()
        self._reporter.update(step=self.boundary.step, total_steps=total)
        self._checkpoints.restart()
        self._timing.begin(self.boundary.step)
        self._agree_at = self._ordinal + 1
        self._rank.beat(self.boundary.step)
        if self.trace is not None:
            self.trace.write(self.boundary, "restored")

    def steps(self, total: int, every: Every) -> Iterator[int]:
        """Yield step numbers from where the run stands up to `total`."""
        self.begin("ctx.steps", total)
        assert self.total is not None
        calls = self._calls(every)
        if self.boundary.step < self.total:
            self._run_due(calls)
        else:
            self._reporter.warn(f"nothing is left to train: the run is at step {self.boundary.step} of {self.total}")
        while self.boundary.step < self.total:
            self.begin_step()
            step = self.boundary.step
            try:
                yield step
            except GeneratorExit:  # a break: the step that was left is done
                self.leave(Boundary(step + 1))
                raise
            is_last = step + 1 == self.total
            self.end_step(Boundary(step + 1), is_last=is_last, due=self._due(calls, step + 1))
            if not is_last:
                self._run_due(calls)
        self.end()
        self._run(list(calls), is_last=True)

    def begin_step(self) -> None:
        """A step begins."""
        self.is_in_step = True
        self._tracked.begin_step()
        self.own_time.begin()

    def end_step(self, boundary: Boundary, *, is_last: bool = False, due: bool = False) -> None:
        """The step is done: agree where it is time, save, stop.

        Args:
            is_last: no step follows. Nothing is saved: the last step is taken again, so that the lines after the loop
                see its values
            due: functions follow at this boundary
        """
        step = boundary.step
        self.own_time.close()
        if self.before_boundary is not None:
            self.before_boundary(step, is_last)
        self.boundary, self.is_in_step = boundary, False
        self._ordinal += 1
        self._rank.page.beat(self._rank.attempt, Phase.STEPPING, step)
        if self.trace is not None:
            self.trace.take(self._reporter.values_now())
        self._reporter.end_step(step - 1)
        if self._ordinal < self._agree_at and not due and not (self._is_alone and self._rank.stop_asked):
            disk, memory = self._checkpoints.is_due_after(step)
            if not (disk or memory or is_last or self.trace is not None or step + 1 == self.total):
                return
        self._agree_and_act(is_last=is_last, due=due)

    def _agree_and_act(self, *, is_last: bool, due: bool) -> None:
        """Agree, and carry out the decision."""
        if self.trace is not None:
            self.trace.write(self.boundary, "boundary")
        decision = self._agree(is_last=is_last)
        self._pending = None
        if is_last:
            return
        if decision.stop or decision.disk or decision.memory or due:
            self.check_health()  # what is saved waits for the losses that the device has not computed yet
        if decision.stop:
            self._stop(None)
        if decision.disk or due:
            pending = self._checkpoints.copy_to_host(self.boundary)
            if decision.disk:
                self._checkpoints.write(pending, wait=decision.holds)
            self._pending = pending if due else None
        elif decision.memory:
            self._checkpoints.snapshot(self.boundary, decision.least_complete)
        self._follow_drill(decision)

    def end(self) -> None:
        """No step is left: the lines after the loop follow."""
        self.is_over, self.is_in_step = True, False
        # Of a break, and of an error in the step, which leaves the loop in the same way: the step counts in `finish`.
        self._rank.beat(self._rank.page.read().step, Phase.ENDING)

    def leave(self, boundary: Boundary) -> None:
        """The training function left the loop by a break; the step that it left is done."""
        self.boundary = boundary
        if self.trace is not None:
            self.trace.take(self._reporter.values_now())
        self._reporter.end_step(max(0, boundary.step - 1), compare=False)  # an error leaves the loop so too
        self.end()

    # Outside of steps: a line of the user's takes as long as it takes, and is no step that hangs

    def outside(self, *, after_step: bool = False) -> bool:
        """Lines of the user's follow, until the next step. Returns False where the rank is in no step."""
        beat = self._rank.page.read()
        if beat.phase is not Phase.STEPPING:
            return False
        if after_step:
            self._rank.beat(beat.step)  # the watchdog measures this step too
        self._rank.beat(beat.step, Phase.OUTSIDE)
        return True

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within it, lines of the user's run; the step goes on after it."""
        was_in_step = self.outside()
        yield
        if was_in_step:
            self._rank.beat(self._rank.page.read().step)

    def begin_pass(self) -> None:
        """The first batch of a pass is there: a step follows."""
        self._rank.beat(self.boundary.step)

    # Agreement

    def _agree(self, *, is_last: bool = False) -> Decision:
        """Exchange wishes; raise the error of a loss that was no number, or of ranks that are apart."""
        step = self.boundary.step
        disk, memory = self._checkpoints.is_due_after(step)
        disk_now, memory_now = self._checkpoints.is_due_now()
        before_last = self.total is not None and step + 1 == self.total
        wish = Wish(
            ordinal=self._ordinal,
            stop=self._rank.stop_asked or self._drill_stops("stop", "epoch end"),
            disk=self._checkpoints.urgency(step) if disk or disk_now else before_last and self.drill is None,
            memory=memory or memory_now,
            bad=self._health.is_bad(waits=False),
            step_seconds=self._timing.measure(step),
            complete=self._checkpoints.checkpointer.snapshots.complete,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        vector = wish.vector()
        maximum = self._ranks.maximum(*vector, *self.own_time.share())
        decision = decide(maximum[: len(vector)])
        self._agree_at = self._ordinal + decision.steps_to_next
        if decision.apart is not None:
            least, greatest = decision.apart
            raise UsageError(
                f"a rank is at boundary {least} of the loop where another is at {greatest}: all ranks take as many "
                "batches in an epoch; DistributedSampler, or drop_last=True, makes loaders as long"
            )
        if decision.bad:
            self._fail()
        self._checkpoints.take_outcomes()
        self._timing.report(step)
        self._reporter.update(
            step=step,
            steps_per_second=self._timing.steps_per_second,
            peak_bytes=decision.peak_bytes,
            rank_seconds=self.own_time.median(maximum[len(vector) :]),
        )
        return decision

    def _fail(self) -> None:
        """Raise NotFinite on all ranks: the rank that saw the loss knows its samples."""
        self._checkpoints.checkpointer.wait_for_write()  # a good state is on its way to the disk
        mine = self._health.error
        errors = self._ranks.gather(None if mine is None else (mine.step, str(mine)))
        if mine is not None:
            raise mine
        rank, (step, text) = next((rank, error) for rank, error in enumerate(errors) if error is not None)
        error = NotFinite(step, float("nan"), [])
        error.args = (f"rank {rank}: {text}",)
        raise error

    def check_health(self) -> None:
        """Raise NotFinite, on all ranks, for any loss so far: before a save."""
        if self._ranks.anywhere(self._health.is_bad()):
            self._fail()

    # Stops

    def _check_stopped(self) -> None:
        """Raise a stop again that was swallowed within functions before the loop."""
        if self.stopped is not None:
            raise self.stopped

    def _stop(self, pending: Pending | None) -> None:
        """Save, and raise Stopped. All ranks come here together."""
        self._checkpoints.saving()
        if pending is None:
            pending = self._checkpoints.copy_to_host(self.boundary)
        self._checkpoints.wait(pending)
        self._raise_stopped(pending.step)

    def _raise_stopped(self, step: int | None) -> None:
        self._reporter.flush()
        safe = f"the checkpoint of step {step} is safe" if step is not None else "no checkpoint was needed"
        if self._rank.rank == 0:
            log.info("stopped at step %d, %s; the same command continues the run", self.boundary.step, safe)
        self.stopped = Stopped(f"stopped at step {self.boundary.step}; {safe}")
        raise self.stopped

    @property
    def may_be_interrupted(self) -> bool:
        """True if a stop within an evaluation has a state to go back to: the same on all ranks."""
        return self._pending is not None or not self.call or self.is_over

    def wants_stop(self) -> bool:
        """Return whether this rank was told to stop, for functions that take long."""
        return self._rank.stop_asked or self._drill_stops("evaluation")

    def stop_if_told(self) -> None:
        """Within functions, on all ranks together: stop if any rank was told to."""
        if not self._ranks.anywhere(self.wants_stop()):
            return
        if self._pending is not None:
            self._stop(self._pending)
        if self.is_over or not self.call:
            # The last step is taken again, or the loop has not begun: the newest checkpoint holds the state.
            self._checkpoints.saving()
            self._checkpoints.checkpointer.wait_for_write()
            self._raise_stopped(self._checkpoints.checkpointer.durable_step)

    # Functions between steps

    def _calls(self, every: Every) -> dict[Call, int]:
        for function, interval in every.items():
            if not callable(function) or not isinstance(interval, int) or interval < 1:
                raise UsageError(
                    f"ctx.steps: every={{{getattr(function, '__name__', function)}: {interval!r}}}: "
                    "expected a function and a number of steps, 1 or more"
                )
        shorten = self.drill.shorten if self.drill is not None else None
        return {function: min(interval, shorten or interval) for function, interval in every.items()}

    def _due(self, calls: Mapping[Call, int], step: int) -> bool:
        return any(step % interval == 0 for interval in calls.values())

    def _run_due(self, calls: Mapping[Call, int]) -> None:
        """Call the functions that are due at this boundary, in order."""
        due = [function for function, interval in calls.items() if self.boundary.step % interval == 0]
        if due and self._pending is None:  # the first boundary of an attempt
            self.copy_for_rollback()
        self._run(due, is_last=False)

    def copy_for_rollback(self) -> None:
        """Copy the state of the attempt's first boundary, for a stop within what follows."""
        self._pending = self._checkpoints.copy_to_host(self.boundary)
        self._pending.is_written = self._checkpoints.checkpointer.durable_step == self.boundary.step

    def note_evaluation(self) -> None:
        """An evaluation that is part of the step under way is done."""
        if self.trace is not None:
            self.trace.take(self._reporter.values_now())
            self.trace.write(self.boundary, "evaluated")

    def _run(self, due: Sequence[Call], *, is_last: bool) -> None:
        if not due:
            return
        step = self.boundary.step
        values: dict[str, float] = {}
        for function in due:
            self._rank.beat(step, Phase.ENDING if is_last else Phase.OUTSIDE)
            result = function()
            if isinstance(result, dict):
                numbers = {str(name): _number(value) for name, value in result.items()}
                self._reporter.log_now(step, numbers)
                self._checkpoints.results |= numbers
                values |= numbers
            elif result is not None:
                raise UsageError(
                    f"{getattr(function, '__name__', 'a function')} of every= returned a {type(result).__name__}: "
                    "expected a dict of numbers, or None"
                )
            self.stop_if_told()
        if self.trace is not None:
            self.trace.take(self._reporter.values_now())
            self.trace.take(values)
            self.trace.write(self.boundary, "evaluated")
        self._reporter.end_step(step, compare=False)
        if self._pending is not None:
            self._checkpoints.offer_best(self._pending, values)
        self._pending = None
        if is_last:
            self.last_values = values
        else:
            self._rank.beat(step)
        self._timing.begin(step)

    # Drills of `jobkit verify`

    def write_end(self, result: Any) -> None:
        """Write the last line of the trace."""
        if self.trace is not None:
            # Rank 0's result is the run's: a function of `every=` may return a number there alone.
            mine = result if self._rank.rank == 0 else None
            self.trace.write(self.boundary, "end", result=mine, files=self.trace.written)

    def _drill_stops(self, *kinds: InterruptionKind) -> bool:
        """Return whether the drill stops this attempt here."""
        item = self.drill.interruption(self._rank.attempt) if self.drill is not None else None
        return item is not None and item.kind in kinds and item.at == self.boundary.step

    def _follow_drill(self, decision: Decision) -> None:
        """Save for a kill at the next boundary; or be killed."""
        item = self.drill.interruption(self._rank.attempt) if self.drill is not None else None
        if item is None or item.kind not in ("memory", "disk"):
            return
        if item.at - 1 == self.boundary.step:
            if item.kind == "disk" or self._tracked.has_files:  # no snapshot holds a framework's own files
                self._checkpoints.write(self._checkpoints.copy_to_host(self.boundary), wait=True)
            else:
                self._checkpoints.snapshot(self.boundary, decision.least_complete)
                self._checkpoints.checkpointer.snapshots.wait()
            self._ranks.barrier()
        elif item.at == self.boundary.step:
            self._reporter.flush()
            self._ranks.barrier()
            if self._rank.rank == self._rank.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)  # the agent ends the others, as after any death


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise UsageError(f"a function of every= returned a tensor of {list(value.shape)}, expected numbers")
    try:
        return as_number(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a function of every= returned a value that is no number: {value!r}") from error
