"""How an attempt ends: finished, stopped, failed, or left by a script; and what is asked about it then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.train.engine import Engine
from jobkit.worker.advice import without_checkpoints
from jobkit.worker.checkpointing import Checkpoints
from jobkit.worker.evaluation import Evaluator
from jobkit.worker.export import export
from jobkit.worker.finish import retry_on_full_disk
from jobkit.worker.loop import TrainingLoop
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.results import numbers, to_json
from jobkit.worker.stop import Stopped, StopSignals, kill_children
from jobkit.worker.tracked_state import TrackedState


class Ending:
    """The end of one rank's attempt; `extra` is that of the manifest of the checkpoint it began with."""

    def __init__(
        self,
        rank: Rank,
        engine: Engine,
        tracked: TrackedState,
        loop: TrainingLoop,
        checkpoints: Checkpoints,
        checkpointer: Checkpointer,
        evaluator: Evaluator,
        reporter: RunReporter,
        signals: StopSignals,
        extra: Mapping[str, Any],
    ) -> None:
        self.is_closed = False
        self.has_returned = "result" in extra
        """Whether the checkpoint this attempt starts from was written after the training function had returned."""
        self._earlier_result = extra.get("result")
        self._last_result: Callable[[], Any] | None = None
        """Of a script whose loop is over: what it is finished with where it ends by itself."""
        self._rank, self._engine, self._tracked, self._loop = rank, engine, tracked, loop
        self._checkpoints, self._checkpointer, self._evaluator = checkpoints, checkpointer, evaluator
        self._reporter, self._signals = reporter, signals

    def finish(self, result: Any = None) -> None:
        """Export the weights, make them, the state and `result` (JSON) durable, record the end, and close."""
        if self._rank.topology.world_size > 1 and not dist.is_initialized():
            raise UsageError(
                "the process group has gone: ctx.finish() comes before dist.destroy_process_group(), since all ranks "
                "write the last checkpoint together"
            )
        in_loop = self._loop.has_begun
        if not in_loop and self._rank.is_main and (self._engine.made_something or not self._evaluator.has_run):
            log.info("%s", without_checkpoints())
        result = to_json(result)
        if in_loop:
            self._loop.settle_losses()
        self._retry(lambda: export(self._rank, self._engine, self._tracked))
        self._log_result(result)
        if in_loop:  # the result goes to the disk before the event: an attempt that dies between them is not repeated
            self._retry(lambda: self._checkpoints.save(self._loop.place, wait=True, extra={"result": result}))
        else:
            self._reporter.mark_metrics()()
        self._loop.end()
        self._loop.report_progress()
        self._record_finished(result)
        self._say_finished(result)

    def end_loop(self, result: Callable[[], Any]) -> None:
        """The loop is over, and durable; the script may go on, and then the run is finished with `result()`."""
        self._reporter.end_step(self._loop.step)
        self._retry(self._loop.save_end)
        self._loop.end()
        self._loop.report_progress()
        self._last_result = result

    def _log_result(self, result: Any) -> None:
        self._reporter.log(numbers(result))
        self._reporter.log_session_end()
        self._reporter.end_step(self._loop.step)

    def _say_finished(self, result: Any) -> None:
        at = f" at step {self._loop.step}" if self._loop.has_begun else ""
        self._reporter.say(f"finished{at}{f': {result}' if result is not None else ''}")

    def _record_finished(self, result: Any) -> None:
        self._reporter.heartbeat.stopping = True  # nothing is left that a time limit could interrupt
        self._reporter.record(Event.FINISHED, step=self._loop.step, result=result)
        self._retry(self._reporter.write_journal)
        self._reporter.finish_mirrors()
        kill_children()
        self.close()

    def _retry(self, action: Callable[[], None]) -> None:
        retry_on_full_disk(self._rank.group, self._signals, action)

    # For the program around the training function

    def finish_again(self) -> None:
        """Record a result that an earlier attempt made durable, and died before it could record it; and close."""
        self._record_finished(self._earlier_result)

    @property
    def ends_by_itself(self) -> bool:
        """Whether the script may end without `finish`: its loop is over, and durable."""
        return self._last_result is not None and not self.is_closed

    def finish_by_itself(self) -> None:
        """Finish a run whose loop is over: where the interpreter ends no checkpoint can be written any more."""
        assert self._last_result is not None
        result = to_json(self._last_result())
        self._log_result(result)
        self._reporter.mark_metrics()()
        self._record_finished(result)
        self._say_finished(result)

    @property
    def stopped(self) -> Stopped | None:
        """What all ranks have left the loop by, together, if they have."""
        return self._loop.stopped

    @property
    def has_begun(self) -> bool:
        """Whether there is, or was, a loop: one whose steps are seen and that stops."""
        return self._loop.has_begun

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is under way."""
        return self._reporter.is_evaluating

    @property
    def loop_is_over(self) -> bool:
        """Whether no step is left to do, as for a function without a loop."""
        return not self._loop.has_begun or self._loop.is_over

    @property
    def durable_step(self) -> int | None:
        """Step of the newest checkpoint on the disk."""
        return self._checkpoints.durable_step

    def position(self) -> tuple[int | None, list[int]]:
        """(the step under way, None outside the loop; ids of the samples that this rank's loaders handed out last)."""
        samples = [sample for loader in self._engine.loaders for sample in loader.current_samples()]
        return (self._loop.step if self._loop.is_in_step else self._loop.left_in), samples

    def wait_for_checkpoint(self, seconds: float | None = None) -> None:
        """The training has ended: give a checkpoint that is being written so long to become durable, for ever where
        None."""
        self._reporter.heartbeat.end()
        self._checkpoints.wait(seconds)

    def close_reports(self) -> None:
        """Write what was logged; without the other ranks, which may be gone."""
        self._reporter.close()

    def record_end(self, event: Event, **fields: Any) -> None:
        """Journal how a script ended without `finish`, on rank 0; without the other ranks, which may be gone."""
        self._reporter.record(event, **fields)
        retry_on_full_disk(RankGroup.alone(), self._signals, self._reporter.write_journal)

    def close(self) -> None:
        """Finish what is being written, on all ranks together, and leave the process group."""
        self.is_closed = True
        self._checkpointer.close()
        self._reporter.close()
        if dist.is_initialized():
            self._rank.group.barrier()  # rank 0 holds the store: it leaves with the others, not before
            if self._rank.owns_process_group:
                dist.destroy_process_group()
                _let_it_be_destroyed_again()


def _let_it_be_destroyed_again() -> None:
    """The last line of most scripts destroys a process group that they took for theirs."""
    destroy = dist.destroy_process_group

    def destroy_if_there(group: dist.ProcessGroup | None = None) -> None:
        if group is not None or dist.is_initialized():
            destroy(group)

    dist.destroy_process_group = destroy_if_there
