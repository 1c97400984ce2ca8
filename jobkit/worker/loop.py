"""The training loop: it yields steps, and between two of them the ranks agree on checkpoints and stops."""

from __future__ import annotations

import math
import operator
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from jobkit.checkpoint import own_files
from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.state import seed_device, set_rng_state
from jobkit.errors import CheckpointError, HardwareFault, NotFinite, UsageError
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.slots import StepMark
from jobkit.train.devices import peak_memory
from jobkit.train.engine import Engine
from jobkit.train.modes import Now
from jobkit.train.optimizer_state import parameters_of
from jobkit.train.seeds import derive_seed, seed_generators
from jobkit.worker.checkpointing import Checkpoints, Place
from jobkit.worker.evaluation import AFTER_LOOP, BEFORE_LOOP, IN_STEP
from jobkit.worker.fingerprint import Fingerprint, StateWatch
from jobkit.worker.generators import tell_replaced_seed
from jobkit.worker.heartbeat import peak_bytes
from jobkit.worker.losses import IN_A_ROW, MAX_SAMPLES, SKIPS_IN_A_ROW, UNUSED_IN_A_ROW, LossWatch, Suspect, is_harmed
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.state_names import LOSS_SCALE
from jobkit.worker.stop import CauseFinder, Stopped
from jobkit.worker.stragglers import StragglerMonitor
from jobkit.worker.timing import StepTimer
from jobkit.worker.tracked_state import TrackedState
from jobkit.worker.untracked import SteppingOptimizers
from jobkit.worker.versions import versions


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
        *,
        end_evaluations: Callable[[], None],
        on_first_step: Callable[[], None] = lambda: None,
        suspect: Suspect | None = None,
    ) -> None:
        self.step = restored.step if restored is not None else 0
        """The step the loop is in, from 0; after the loop, the number of steps done."""
        self.total: int | None = None
        """How many steps there are; None where that is not known, as before the loop."""
        self.call = "the loop"
        """What the script calls for it: ctx.steps, ctx.epochs or ctx.boundary."""
        self.has_begun = False
        self.is_over = False
        """Whether it has ended by itself, so that no step is left to do."""
        self.shown_total: int | None = None
        """The total of progress reports, which may be an estimate."""
        self.stopped: Stopped | None = None
        self._rank, self._engine, self._tracked, self._restored = rank, engine, tracked, restored
        self._checkpoints, self._reporter = checkpoints, reporter
        self._schedule, self._memory_schedule = checkpoints.schedule, checkpoints.memory_schedule
        self._signals, self._finder = finder.signals, finder
        self.stragglers = StragglerMonitor(rank, reporter)
        self._timer = StepTimer()
        self._mark = StepMark(os.environ, rank.attempt)
        self._on_first_step, self._end_evaluations = on_first_step, end_evaluations
        self._optimizer_steps = 0
        """Of optimizers that are tracked."""
        self._stepping: SteppingOptimizers | None = None
        self._is_continued = self._has_stepped = False
        self.is_in_step = False
        self.left_in: int | None = None
        """The step in which a break or an exception has left the loop."""
        self._place_number = 0
        self._is_due_later = False
        """Whether a checkpoint was due where none could be."""
        self.is_held = False
        """Whether what follows the last batch of an epoch needs what the loop over the batches has set."""
        self._write_files: own_files.Write | None = None
        """What writes a framework's own files into each checkpoint."""
        self._watch = StateWatch(rank.devices)
        self._step_start: Fingerprint | None = None
        """The state that the step under way began with; None where it is not known."""
        self._modes: dict[str, Now] | None = None
        """Those that it began with: an evaluation changes them, and maybe back. None between two steps."""
        self._has_verified = False
        self._has_loss_scale = rank.config.precision == "fp16"
        self._losses = LossWatch(
            rank.device,
            str(rank.config.on_nan),
            is_harmed=self._is_harmed,
            updates=lambda: self._stepping.count if self._stepping is not None else 0,
            can_go_back=lambda: checkpoints.durable_step is not None,
            suspect=suspect,
            allowed_in_a_row=IN_A_ROW if self._has_loss_scale else UNUSED_IN_A_ROW,
        )
        self._is_harmless_told = False
        self._evaluated_at: deque[int] = deque(maxlen=2)
        """The last steps that evaluated something."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        def count(*_: Any) -> None:
            self._optimizer_steps += 1

        optimizer.register_step_post_hook(count)
        self._engine.watch(optimizer)

    def steps(self, total: int) -> Iterator[int]:
        self.check_first()
        self.call = "ctx.steps"
        self.check_left(self.step, total)
        self.begin(total)
        while self.step < total:
            self.begin_step()
            yield self.step
            self.end_step()
        self.end()

    def until_left(self, loop: Iterator[int]) -> Iterator[int]:
        """What `loop` yields; a break or an exception that leaves it leaves the step, too."""
        try:
            yield from loop
        except GeneratorExit:
            self._leave()
            raise

    def begin_step(self) -> None:
        self._step_start = self._watch.take_if_cheap(evaluation_expected=self._expects_evaluation())
        self._modes = self._tracked.modes() if self._step_start is not None else None
        self.is_in_step = True
        self.stragglers.timer.begin()

    def end_step(self, step: int | None = None, *, stays: bool = False) -> None:
        """The step is done, and so are all up to `step`, where it is given. Saves and stops as needed.

        With `stays` it does so later, in `end_epoch` or at the end of the next step. Raises Stopped, on every rank,
        after a signal to stop.
        """
        self.stragglers.timer.end()
        self._check_verified()
        self._losses.end_step(self.step, self._samples())
        if self._losses.suspect is not None and self.step >= self._losses.suspect.step:
            self._judge(self._losses.suspect)
        if self._engine.takes_skipped():
            self._record_skipped()
        self._end_evaluations()  # nothing of them will be repeated
        self._modes = None
        self.step, self._place_number = self.step + 1 if step is None else step, 0
        if self._stepping is not None and self._write_files is None:  # else nobody knows what is saved by another
            self._stepping.end_step()
        if self._optimizer_steps:
            self._engine.check_updated(is_continued=self._is_continued)
        self._engine.average_replicas(self.step, self._of_type(torch.optim.Optimizer), is_last=self.step == self.total)
        self._mark.set(self.step)
        self._reporter.heartbeat.beat()
        if not self._has_stepped:
            self._has_stepped = True
            self._checkpoints.check_state()  # whatever makes ranks differ, as a seed by rank, has done so by now
            self._reporter.record_soon(Event.STEPPED)
            self._on_first_step()
        self._reporter.end_step(self.step - 1)  # before the boundary: a checkpoint there marks where curves end
        if stays:
            self._is_due_later = self._is_due_later or self._schedule.is_due_after(self.step)
            self.report_progress()
        else:
            self._boundary()

    def boundary(self, step: int, write_files: own_files.Write | None, total: int | None) -> None:
        """Between two steps of a loop that another drives: `step` are done."""
        step, total = _whole(step), None if total is None else _whole(total)
        self._write_files = write_files
        self.shown_total = total
        if not self.has_begun:
            _check_first(step, self.step, None if self._restored is None else self._restored.name)
            self.call = "ctx.boundary"
            self.begin(None)
        elif step > self.step:
            self.end_step(step)
        elif step == self.step:
            self.look()
        else:
            raise UsageError(f"ctx.boundary({step}): {self.step} steps are done; steps only go up")
        self.is_over = total is not None and step >= total
        self.begin_step()

    def look(self) -> None:
        """Look for a stop again where a step has ended, as within another framework's evaluation."""
        self._end_step_again()
        self._agree()
        self.report_progress()

    def end_epoch(self, *, is_last: bool) -> None:
        """What follows the last step of an epoch is done. Saves and stops as needed, unless no epoch is left."""
        self._end_step_again()
        if not is_last:  # else finishing is the quickest answer to whatever it is
            self._timer.agree_at = self.step
            self._boundary()

    def _end_step_again(self) -> None:
        self._end_evaluations()
        self._modes = None
        self._place_number += 1
        self._reporter.heartbeat.beat()
        self._reporter.end_step(max(0, self.step - 1))

    def save_end(self) -> None:
        """Make a checkpoint of where the loop ended, with what a framework writes into it; it must succeed."""
        self._save(wait=True)

    def end(self) -> None:
        """No step is left to do."""
        self._losses.settle()
        self._leave()
        self.is_over, self.left_in = True, None

    def _leave(self) -> None:
        """What comes now is after the loop."""
        self.left_in = self.step if self.is_in_step else None
        self.is_in_step = False
        if self._losses.harmless > 1:
            log.info("the loss of %d steps was no finite number here, without harm", self._losses.harmless)
            self._losses.harmless = 0
        self._modes = None
        if self._stepping is not None:
            self._stepping.end()  # a checkpoint after the loop asks what they train
        self._reporter.heartbeat.end()

    def count_step(self) -> None:
        """The step under way is done, and the loop was left in it: nothing is saved, for it does not go on."""
        self._reporter.end_step(self.step)
        self.step += 1

    @property
    def where(self) -> str:
        """What tells evaluations of one step apart."""
        if self.is_in_step:
            return IN_STEP
        return AFTER_LOOP if self.has_begun else BEFORE_LOOP

    @property
    def place(self) -> Place:
        return Place(self.step, self._place_number)

    def _of_type(self, kind: type[Any]) -> list[Any]:
        return [value for value in self._tracked.objects.values() if isinstance(value, kind)]

    def fingerprint(self) -> Fingerprint:
        """Of the state at this moment."""
        return self._watch.take()

    def restore_again(self, restored: RestoredCheckpoint, before: Fingerprint) -> None:
        """Set everything to the checkpoint again, where it has changed since a moment; random numbers in any case."""
        self._reporter.drop_step()
        if self._watch.take() != before:
            self._tracked.restore_again(restored)
        self._tracked.restore_attributes()
        self._continue_local_state(restored)

    # The beginning

    def begin(self, total: int | None) -> None:
        """Restore what is left to restore. Raises UsageError where there was a loop before."""
        self.check_first()
        self.has_begun = True
        self._is_continued = self._restored is not None
        if self._is_continued:
            self._reporter.drop_step()
        self._engine.check_tracked(self._tracked.all_objects())
        self._tracked.check_unchanged()
        self.total = total
        self.shown_total = self.shown_total or total
        if self._engine.scaler is not None:
            self._tracked.add(LOSS_SCALE, self._engine.scaler)
        restored = self._restored
        self._tracked.settle_schedules()
        self._tracked.begin_modes()
        self._tracked.restore_gradients()
        if missing := self._tracked.forget_checkpoint():
            raise CheckpointError(
                f"{restored and restored.name} has {', '.join(missing)}, which the code no longer tracks; "
                f"call ctx.track with it before the loop, or {restored and restored.way_out}"
            )
        self._record_resumed(self.shown_total)
        self._tell_seed()
        self._tracked.kept_workers.begin_loop()
        self._continue_local_state(self._restored)
        self._watch.track(self._tracked.all_objects())
        self._restored = None  # its tensors are in the model by now
        self._own_signals()
        self.report_progress()
        self._timer.start(self.step)
        self._reporter.heartbeat.begin()
        self._schedule.restart()
        self._memory_schedule.restart()
        self._stepping = SteppingOptimizers(self._tracked.all_objects)

    def check_first(self) -> None:
        """Raise UsageError where there was a loop before."""
        if not self.has_begun:
            return
        raise UsageError(
            f"one loop in a run, and {self.call} has begun one: a second would not know where it was resumed. For "
            "folds make each a run, with its number among the params, as in `python train.py --fold 2`; or one loop of "
            "all, `for n in ctx.epochs(folds * epochs, ...)` with `fold, epoch = divmod(n, epochs)`, and what each "
            "fold trains made before it"
        )

    def check_left(self, done: int, total: int) -> None:
        """Raise UsageError where nothing is left of a loop that begins where another run was, so that no body of it
        ever runs. `done` and `total` are steps, or epochs."""
        restored = self._restored
        if restored is not None and restored.of_other_run and done >= total > 0:
            start = self._rank.config.start_from
            raise UsageError(
                f"the run starts from {start}, and {self.call}({total}) has nothing left: let it have more "
                f"{self.call.removeprefix('ctx.')}, or take the weights alone, with --weights-only"
            )

    def _record_resumed(self, total: int | None) -> None:
        began: dict[str, Any] = {"checkpoint": None}
        joined = round(self._rank.joined, 3)
        if (restored := self._restored) is not None and restored.snapshot is None:
            began = {"checkpoint": restored.path.name}
        elif restored is not None:
            began = {"memory": True, "durable_step": restored.durable_step}
        began["versions"] = versions(self._rank.device)
        self._reporter.record(Event.RESUMED, step=self.step, total_steps=total, joined=joined, **began)

    def _tell_seed(self) -> None:
        seed = self._rank.config.seed
        if seed is not None and self._rank.is_main:
            tell_replaced_seed(seed)

    def _continue_local_state(self, restored: RestoredCheckpoint | None) -> None:
        """Random numbers, and what else differs from rank to rank: as they were, or as on a new rank."""
        parallel = self._engine.parallel
        world_size = self._rank.topology.world_size
        same_world = restored is not None and restored.manifest.world_size == world_size
        own_seed = self._rank.config.seed
        seed = derive_seed(own_seed or 0, "train", parallel.data_rank, self.step)  # dropout differs by share
        # Ranks that compute the same samples draw the same numbers, which those of another layout may not have done.
        if restored is not None and restored.local is not None and (same_world or parallel.layout.data == world_size):
            for device in set_rng_state(restored.local["rng"], *self._rank.devices):
                seed_device(device, seed)  # it was on other devices before, as on the CPU
        elif restored is not None or own_seed is not None:
            seed_generators(seed, *self._rank.devices)
        if restored is not None and restored.local is not None and same_world:
            self._tracked.load_own_state(restored.local)

    # Between two steps

    def _boundary(self) -> None:
        self._own_signals()
        if self.step == self.total:
            return  # whatever it is, finishing is the quickest answer to it
        due = self._is_due_later or (self._place_number == 0 and self._schedule.is_due_after(self.step))
        # What the function does after the loop may need the last step's values, and may be killed: then that one step
        # is repeated. The final checkpoint comes with the function's result.
        due = due or self.step + 1 == self.total
        in_memory = self._write_files is None and self._memory_schedule.is_due_after(self.step)
        alone = self._rank.topology.world_size == 1  # whose signals nobody else has to hear of
        if self._timer.agree_at <= self.step or (alone and self._signals.pending):
            by_time, in_memory_by_time = self._agree()
            due, in_memory = due or by_time, in_memory or in_memory_by_time
        if due:
            self._is_due_later = False
            self._save(is_last=self.step + 1 == self.total)
        elif in_memory and self._write_files is None:
            self.settle_losses()
            self._checkpoints.snapshot(self.step)
        self.report_progress()

    def _save(self, **options: Any) -> None:
        self.settle_losses()
        self._checkpoints.save(self.place, write_files=self._write_files, **options)

    def settle_losses(self) -> None:
        """Before a checkpoint, on all ranks together: raise NotFinite where a loss was no number and has done harm, be
        it in another rank's part of the model."""
        self._losses.settle()
        if not (self._losses.is_on and self._rank.group.anywhere(self._losses.doubt is not None)):
            return
        doubt, self._losses.doubt = self._losses.doubt, None
        # What is not known any more, when the training function has returned, was looked at as the step ended.
        if self._rank.group.anywhere(self._is_harmed(unknown=False)):
            if doubt is not None:
                raise doubt
            self._rank.group.barrier()  # the rank that raises does not come here
        is_told = doubt is not None and self._losses.harmless > 0
        found = self._rank.group.gather((doubt.step, doubt.samples[:MAX_SAMPLES]) if doubt and is_told else None)
        first = next(((rank, one) for rank, one in enumerate(found) if one is not None), None)
        if first is not None and not self._is_harmless_told:
            self._is_harmless_told = True
            rank, (step, samples) = first
            self._reporter.record(Event.LOSS_WITHOUT_HARM, step=step, rank=rank, samples=samples)

    def _is_harmed(self, *, unknown: bool = True) -> bool:
        """Whether this rank's weights or gradients are not finite; `unknown` where it knows of none."""
        trained = self._trained()
        # The gradients of fp16 may overflow: its loss scale does not use them then.
        return is_harmed(trained, with_gradients=not self._has_loss_scale) if trained else unknown

    def _trained(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that are trained, as far as they are known: what a framework trains is not tracked."""
        of_optimizers = [one for value in self._of_type(torch.optim.Optimizer) for one in parameters_of(value)]
        modules = self._tracked.replicas()
        of_modules = [one for module in modules for one in module.parameters() if one.requires_grad]
        return of_optimizers or of_modules or (self._stepping.parameters() if self._stepping is not None else [])

    def _own_signals(self) -> None:
        """In each step: a signal that goes to another handler would not stop the run."""
        for said in self._signals.take_back():
            if self._rank.is_main:
                log.info("%s", said)

    def _agree(self) -> tuple[bool, bool]:
        """Exchange what only some ranks know, and stop where one was told to.

        Whether the clock asks for a checkpoint, and whether for a snapshot in memory.
        """
        main, seconds = self._rank.is_main, self._timer.measure(self.step)
        # Half a step on: what follows the last batch of an epoch is done.
        stands = self.step + (0.5 if self._place_number else 0.0)
        furthest, least, told, by_time, in_memory, slowest, peak, compare = self._rank.group.maximum(
            stands,
            -stands,
            self._signals.pending,
            main and self._schedule.is_due_by_time(),
            main and self._memory_schedule.is_due_by_time(self._schedule.seconds_left),
            seconds,
            peak_bytes(),
            self.stragglers.is_due(),
        )
        if furthest != -least:
            raise UsageError(
                f"a rank is at step {int(-least)} of the loop where another is at step {math.ceil(furthest)}: all "
                "ranks take as many batches in an epoch; DistributedSampler, or drop_last=True, makes loaders as long"
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
        is_after = self.has_begun and not self.is_in_step
        if is_after:  # the last step is repeated, since what follows the loop may need its values
            self._checkpoints.wait()
        elif self.has_begun and not self._checkpoints.is_durable(self.place):
            self._tracked.modes_of_save = self._modes
            self._save(wait=True, must=False)
        durable = self._checkpoints.durable_step
        self._reporter.record(Event.INTERRUPTED, cause=cause, step=durable or 0, reached=self.step)
        kept = "its checkpoint is safe" if durable == self.step else "no checkpoint of it"
        if is_after and durable is not None:
            kept = f"the checkpoint of step {durable} is safe"
        self._reporter.say(f"stopped at step {self.step}, {kept}; the same command continues the run")
        self._signals.call_others()
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
        peak = peak_memory(self._rank.device)
        if peak is not None:
            values["perf/peak_memory_gib"] = peak / 2**30
        self._reporter.scalars(self.step - 1, values)

    def report_progress(self) -> None:
        self._reporter.update(
            step=self.step, total_steps=self.shown_total, steps_per_second=self._timer.steps_per_second
        )

    # Within a step

    def see_share(self, loss: torch.Tensor) -> None:
        """The loss of this rank's share of a batch, in ctx.backward."""
        if self.is_in_step:
            self._losses.see_share(loss)

    def see_mean(self, mean: torch.Tensor) -> None:
        """What ctx.backward has found, the same on all ranks: raises NotFinite, on the ranks whose shares it is of,
        where it is known to be no number and a rank's gradients are not finite."""
        if not (self.is_in_step and self._losses.see_mean(mean)):
            return
        harmed = self._losses.is_harmed()
        if harmed if self._engine.parallel.drifts else self._rank.group.anywhere(harmed):
            self._losses.raise_found(self.step, self._samples())
            self._rank.group.barrier()  # a rank that raises does not come here

    def see_logged(self, values: Mapping[str, Any]) -> None:
        """What the script logs: losses among it are looked at as those of `see_loss`."""
        if self.is_in_step:
            self._losses.see_logged(values, self.step, self._samples())

    def _judge(self, suspect: Suspect) -> None:
        """The step of which the loss was no number is repeated, and the loss is one: raises HardwareFault where that
        tells of a node."""
        self._losses.settle()
        self._rank.group.barrier()  # a rank that has found it again does not come here
        self._losses.suspect = None
        self._reporter.record(Event.HARDWARE_FAULT, step=suspect.step, node=suspect.node)
        if self._rank.is_main:
            log.info("the loss of step %d was no number, and is one when the step is repeated", suspect.step)
        if suspect.node is not None:
            raise HardwareFault(suspect.step, suspect.node, suspect.node)

    @property
    def is_verified_now(self) -> bool:
        """Whether the step under way is one whose gradients are computed again: `verify_every`."""
        every = self._rank.config.verify_every
        return self.is_in_step and every > 0 and (self.step + 1) % every == 0

    def verify(self, is_alike: bool) -> None:
        """On all ranks: raise HardwareFault where a rank has not computed the same bits again."""
        self._has_verified = True
        here = os.environ.get("SLURMD_NODENAME"), socket.gethostname()
        found = self._rank.group.gather((is_alike, *here))
        for rank, (same, node, host) in enumerate(found):
            if not same:
                self._reporter.record(Event.HARDWARE_FAULT, step=self.step, node=node, rank=rank)
                raise HardwareFault(self.step, f"rank {rank} on {node or host}", node)

    def _check_verified(self) -> None:
        """Raise UsageError where a step that was to be verified has called nothing that could be."""
        if self.is_verified_now and not self._has_verified:
            raise UsageError("verify_every compares what ctx.backward(model, ...) computes: use it, or leave that out")
        self._has_verified = False

    def _record_skipped(self) -> None:
        """Journal the batch of this step, which all ranks have left out."""
        found = self._samples()()
        samples = [one for of_rank in self._rank.group.gather(found) for one in of_rank]
        self._reporter.record(Event.BATCH_SKIPPED, step=self.step, samples=samples[:MAX_SAMPLES])
        if self._rank.is_main:
            log.info("the loss of step %d is no number: its batch is left out", self.step)
        if self._engine.skipped_in_a_row > SKIPS_IN_A_ROW:
            raise NotFinite(self.step, found, f"no number, as those of the {SKIPS_IN_A_ROW} batches before it")

    def _samples(self) -> Callable[[], list[int]]:
        """What gives the ids of the samples of the step under way, also when it is over."""
        drawn = [(loader, loader.current) for loader in self._engine.loaders if loader.current is not None]
        return lambda: [sample for loader, number in drawn for sample in loader.samples_of(number)]

    def may_stop_here(self) -> bool:
        """Whether the step has changed nothing that a checkpoint would hold; before the loop there is none.

        After the loop, whether one that repeats the last step comes here again with what evaluations have found.
        """
        if not self.is_in_step:
            return not self.has_begun or self._ends_again()
        if self.is_held:
            return False
        return self._step_start is not None and self._step_start == self._watch.take()

    def _ends_again(self) -> bool:
        # An evaluation is not known by weights that are shared out, and a GPU may compute others in the repeated step.
        parallel = self._engine.parallel
        is_whole = not (parallel.forward_is_collective or parallel.parallel.offload)
        return is_whole and self.step == self.total and self._checkpoints.is_safe(Place(self.step - 1))

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


def _check_first(step: int, stands: int, checkpoint: str | None) -> None:
    if step == stands:
        return
    if checkpoint is None:
        raise UsageError(
            f"ctx.boundary({step}): the run begins, so the first call is ctx.boundary(0), before the first step"
        )
    raise UsageError(
        f"ctx.boundary({step}): {checkpoint} is of step {stands}: load what ctx.checkpoint holds first, and call "
        f"ctx.boundary({stands}) before the next step"
    )


def _whole(step: Any) -> int:
    """A number of steps, NumPy's and torch's too."""
    try:
        return operator.index(step)
    except TypeError:
        raise UsageError(f"ctx.boundary({step!r}): expected a whole number of steps") from None
