"""jobkit.Context: what a training function is given, and the loop that survives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.errors import EXIT_RESUMABLE, CheckpointError, JobkitError
from jobkit.run.events import Event
from jobkit.train.data import Loader, derive_seed, seed_generators
from jobkit.train.evaluate import Metrics, PerSample, means
from jobkit.train.parallel import unwrapped
from jobkit.train.zero1 import Zero1
from jobkit.worker.checkpointing import Checkpoints, retry_on_full_disk
from jobkit.worker.engine import Engine
from jobkit.worker.evaluation import Evaluations
from jobkit.worker.export import whole_weights, write_weights
from jobkit.worker.heartbeat import peak_bytes
from jobkit.worker.pace import StepTimer
from jobkit.worker.results import flat, literal, numbers, to_json
from jobkit.worker.session import Session
from jobkit.worker.stragglers import Stragglers
from jobkit.worker.tracked_state import TrackedState


class Stopped(SystemExit):
    """Raised out of the loop, on every rank, after the checkpoint: this attempt is over, the run is not.

    A SystemExit, so that `except Exception` in a training function does not catch it, and a plain script ends with
    exit code 75.
    """

    def __init__(self, cause: str, step: int) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.cause = cause
        self.step = step


class Context(Engine):
    """One rank's view of a run. See the README for a training function that uses all of it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.params: DictConfig = OmegaConf.create(literal(session.config.params))
        """The YAML's `params`, read-only."""
        OmegaConf.set_readonly(self.params, True)
        self.seed: int = session.config.seed
        self.step: int = 0
        """The step the loop is in, from 0; after the loop, the number of steps done."""
        self._loaded: RestoredCheckpoint | None = session.checkpointer.load_newest(names=())
        self._total: int | None = None
        self._logged: dict[str, Any] = {}
        self._images: list[tuple[str, torch.Tensor]] = []
        self._texts: list[tuple[str, str]] = []
        self._videos: list[tuple[str, torch.Tensor]] = []
        self._step_start: object = None
        """What the current step had touched when it began: nothing; None outside the loop."""
        self._optimizer_steps = 0
        self._pace = StepTimer()
        self._tracking = TrackedState(self._parallel, session.checkpointer, self._loaded)
        self._stragglers = Stragglers(session)
        self._evaluations = Evaluations(session, self._parallel, self._loaded.step if self._loaded else None)
        self.saver = Checkpoints(session, self._loaded.step if self._loaded else None)
        for step, reason in session.checkpointer.set_aside:
            session.record(Event.SET_ASIDE, step=step, reason=reason)
            if session.is_main:
                print(f"jobkit: the checkpoint of step {step} is damaged and was set aside: {reason}", flush=True)
        seed_generators(derive_seed(self.seed, "init"))  # equal on all ranks: equal initial weights
        if self._loaded:
            self.step = self._loaded.step
        session.start_metrics((self._loaded.manifest.extra.get("tensorboard", {}) if self._loaded else {}), self.step)

    # Where and who

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self._session.topology.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self._session.topology.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._session.topology.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files."""
        return self._session.is_main

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._session.device

    @property
    def attempt(self) -> int:
        """How many times the run has been started, this one included."""
        return self._session.attempt

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._session.run.path

    @property
    def in_loop(self) -> bool:
        """Whether a step is under way."""
        return self._step_start is not None

    def current_samples(self) -> list[int]:
        """Ids of the samples that this rank's loaders handed out last: whom to suspect when a step fails."""
        loaders = [value for _, value in self._made if isinstance(value, Loader)]
        return [sample for loader in loaders for sample in loader.current_samples()]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._session.control.barrier()

    # State

    def track(self, **objects: Any) -> None:
        """Make objects part of the checkpoint, by name; where the run is being continued they are restored here.

        Anything with state_dict and load_state_dict. Raises CheckpointError for one whose state does not fit.
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(f"ctx.track({name}=...): {type(value).__name__} has no state_dict and load_state_dict")
            self._tracking.add(name, value)
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_post_hook(self._count_optimizer_step)

    # The loop

    def steps(self, total: int) -> Iterator[int]:
        """Yield step numbers up to `total`, from where the run stands; checkpoint and stop in between as needed.

        A step ends where the loop asks for the next one. Raises Stopped, on every rank, after a notice to stop.
        """
        self._begin_loop(total)
        while self.step < total:
            self._step_start = self._fingerprint()
            self._stragglers.own.begin()
            yield self.step
            self._stragglers.own.end()
            self.step += 1
            self._insist_on_update(self._optimizer_steps)
            self._average_replicas(total)
            self._session.pulse.beat()
            self._flush_logs(self.step - 1)
            self._boundary()
        self._step_start = None
        self._session.pulse.end()

    def _begin_loop(self, total: int) -> None:
        if self._total is not None:
            raise JobkitError("ctx.steps is called once in a run: a second loop would not know where it was resumed")
        tracked = [unwrapped(value) for value in self._tracking.objects.values()]
        for what, value in self._made:
            if not any(unwrapped(value) is one for one in tracked):
                raise JobkitError(
                    f"{what} is not tracked, so a run that is interrupted would lose it: "
                    "call ctx.track(model=..., optimizer=..., loader=...) before ctx.steps"
                )
        sharing = self._parallel.parallel.data == "zero1" and self._parallel.layout.data > 1
        optimizers = [value for value in tracked if isinstance(value, torch.optim.Optimizer)]
        if sharing and optimizers and not any(isinstance(one, Zero1) for one in optimizers):
            raise JobkitError("parallel: zero1 shards the optimizer's state: make it by ctx.optimizer(model, ...)")
        self._total = total
        if self._scaler is not None:
            self._tracking.add("loss_scale", self._scaler)
        if self._loaded:
            if missing := self._tracking.forget_checkpoint():
                raise CheckpointError(
                    f"{self._loaded.path.name} has {', '.join(missing)}, which the code no longer tracks; "
                    "call ctx.track with it before ctx.steps, or submit with --fresh"
                )
            self._session.record(Event.RESUMED, step=self.step, total_steps=total, checkpoint=self._loaded.path.name)
        else:
            self._session.record(Event.RESUMED, step=0, total_steps=total, checkpoint=None)
        self._continue_local_state()
        self._loaded = None  # its tensors are in the model by now
        self._report_progress()
        self._pace.start(self.step)
        self._session.pulse.begin()
        self.saver.start()

    def _continue_local_state(self) -> None:
        """Random numbers, and what else differs from rank to rank: as they were, or as on a new rank."""
        loaded, layout = self._loaded, self._parallel.layout
        same_world = loaded is not None and loaded.manifest.world_size == self.world_size
        # Ranks that compute the same samples draw the same numbers, which those of another layout may not have done.
        if loaded is not None and loaded.local is not None and (same_world or layout.data == self.world_size):
            set_rng_state(loaded.local["rng"], self.device)
        else:  # dropout differs from share to share
            seed_generators(derive_seed(self.seed, "train", self._parallel.data_rank, self.step))
        if loaded is not None and loaded.local is not None and same_world:
            self._tracking.load_local_state(loaded.local)

    def _boundary(self) -> None:
        """Between two steps: measure, agree, save or stop."""
        session, pace = self._session, self._pace
        if self.step == self._total:
            return  # whatever it is, finishing is the quickest answer to it
        due = self.saver.is_due_after(self.step)
        # What the function does after the loop may need the last step's values, and may be killed: then that one step
        # is repeated. The final checkpoint comes with the function's result.
        due = due or self.step + 1 == self._total
        if self.world_size == 1 or pace.agree_at <= self.step:
            seconds = pace.measure(self.step)
            told, by_time, slowest, peak, compare = session.control.maximum(
                session.notices.pending, self.saver.is_due_by_time(), seconds, peak_bytes(), self._stragglers.is_due()
            )
            session.progress["peak_bytes"] = int(peak)
            due = due or bool(by_time)
            pace.agree_after(self.step, slowest)
            if told:
                self._stop_if_told()
            if compare:
                self._stragglers.compare(self.step)
            self._log_performance()
        if due:
            self._save()
        self._report_progress()

    def _stop_if_told(self) -> None:
        """Every rank is here: ask why, and unless it was a false alarm save and leave."""
        cause = self._session.control.from_main(self._session.cause.find() if self.is_main else None)
        if cause is None:
            self._session.notices.clear()
            return
        self._session.pulse.stopping = True
        self._stop(str(cause))

    def _stop(self, cause: str) -> None:
        self._end_averaged()
        if self.saver.durable_step != self.step and self._total is not None:
            self._save(wait=True, must=False)
        self._evaluations.keep(self.saver.durable_step)
        self._session.record(Event.INTERRUPTED, cause=cause, step=self.saver.durable_step or 0, reached=self.step)
        raise Stopped(cause, self.step)

    def _save(self, **options: Any) -> None:
        """Checkpoint the state as of `self.step` steps done; see Checkpoints.save."""

        def state() -> tuple[dict[str, Any], Any, dict[str, Sequence[int]]]:
            shared, held_by = self._tracking.trees()
            return shared, {"rng": rng_state(self.device), **self._tracking.local_state()}, held_by

        self.saver.save(self.step, state, **options)

    def _fingerprint(self) -> tuple[object, ...]:
        """Changes as soon as a step draws a batch or a random number, or takes an optimizer's step."""
        positions = [value.position for value in self._tracking.objects.values() if isinstance(value, Loader)]
        return positions, self._optimizer_steps, torch.get_rng_state().numpy().tobytes()

    def _count_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    # Logging

    def log(self, values: Mapping[str, Any]) -> None:
        """Scalars for TensorBoard at the current step, rank 0's: numbers, or one-element tensors, not synchronised."""
        if self.is_main:
            for tag, value in values.items():
                self._logged[tag] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def log_image(self, tag: str, image: torch.Tensor) -> None:
        """An image for TensorBoard at the current step: CHW, uint8 or float in [0, 1]."""
        if self.is_main:
            self._images.append((tag, image.detach().clone()))

    def log_video(self, tag: str, video: torch.Tensor) -> None:
        """A short video for TensorBoard at the current step, as an animated GIF: uint8 [T, C, H, W], C of 1 or 3."""
        if self.is_main:
            self._videos.append((tag, video.detach().clone()))

    def log_text(self, tag: str, text: str) -> None:
        """A text for TensorBoard at the current step, which shows it as Markdown."""
        if self.is_main:
            self._texts.append((tag, text))

    def _flush_logs(self, step: int) -> None:
        """Hand a whole step's values on: one that was broken off half-way is logged when it is repeated."""
        metrics = self._session.metrics
        if metrics is None:
            return
        if self._logged:
            metrics.scalars(step, self._logged)
            self._logged = {}
        for tag, image in self._images:
            metrics.image(step, tag, image)
        for tag, text in self._texts:
            metrics.text(step, tag, text)
        for tag, video in self._videos:
            metrics.video(step, tag, video)
        self._images, self._texts, self._videos = [], [], []

    def _log_performance(self) -> None:
        metrics, sample = self._session.metrics, self._pace.sample(self.step)
        if metrics is None or sample is None:
            return
        values: dict[str, Any] = {"perf/step_seconds": sample}
        loaders = [value for value in self._tracking.objects.values() if isinstance(value, Loader)]
        if loaders:
            values["perf/samples_per_second"] = loaders[0].global_batch_size / sample
            values["perf/epoch"] = loaders[0].epoch
        for value in self._tracking.objects.values():
            if isinstance(value, torch.optim.Optimizer):
                values["train/lr"] = value.param_groups[0]["lr"]
                break
        metrics.scalars(self.step - 1, values)

    def _report_progress(self) -> None:
        self._session.progress["step"] = self.step
        self._session.progress["total_steps"] = self._total
        self._session.progress["steps_per_second"] = self._pace.steps_per_second

    # Evaluation

    @overload
    def evaluate(self, function: PerSample, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> float: ...

    @overload
    def evaluate(
        self, function: Metrics, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> dict[str, float]: ...

    def evaluate(
        self, function: PerSample | Metrics, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> float | dict[str, float]:
        """The mean of `function(batch, ids)`, one value a sample, over the dataset; all ranks work, all get the same.

        A function that returns several, {name: [n]}, has a mean for each name. Batches of `batch_size` samples go to
        whichever rank is free. The training's random numbers are untouched, gradients are off. A notice to stop is
        obeyed in here too, where that repeats nothing: before a step has drawn a batch or a random number. So evaluate
        at the top of a step; the next attempt goes on with what has been computed.
        """
        return means(self.evaluate_samples(function, dataset, batch_size=batch_size, **options))

    @overload
    def evaluate_samples(
        self, function: PerSample, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> torch.Tensor: ...

    @overload
    def evaluate_samples(
        self, function: Metrics, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> dict[str, torch.Tensor]: ...

    def evaluate_samples(
        self, function: PerSample | Metrics, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """What `evaluate` takes the mean of: float64 [len(dataset)] by sample number, on the CPU of every rank."""
        self._tracking.share_buffers()
        scores = self._evaluations.run(
            function,
            dataset,
            batch_size=batch_size,
            step=self.step,
            seed=self.seed,
            models=[value for _, value in self._made],
            may_stop=self._may_stop_within_step,
            stop_if_told=self._stop_if_told,  # what this step has logged so far is dropped: it will be logged again
            **options,
        )
        self._pace.agree_next(self.step)
        self._stragglers.own.begin()  # in there the ranks waited for each other
        return scores.result()

    def _may_stop_within_step(self) -> bool:
        """Whether nothing of the step has been done yet; after the loop, going on to the end is what is left to do."""
        if self._step_start is None:
            return self._total is None
        return self._step_start == self._fingerprint()

    # The end

    def finish(self, result: Any = None) -> None:
        """The function has returned: export the weights, and make them, the state and the result durable."""
        session = self._session
        if self._total is None and self._made and self.is_main:
            print("jobkit: the function returned without ctx.steps: there were no checkpoints", flush=True)
        result = to_json(result)
        retry_on_full_disk(session, self._export)
        if session.is_main and session.metrics is not None:
            self._logged.update(numbers(result))
            session.metrics.hparams(flat(self.params), numbers(result))
        self._flush_logs(self.step)
        if self._total is not None:
            retry_on_full_disk(session, lambda: self._save(wait=True, extra={"result": result}))
        elif session.metrics is not None:
            session.metrics.mark().result(timeout=60)
        self._report_progress()
        self._record_finished(result)

    @property
    def has_returned(self) -> bool:
        """Whether the checkpoint this attempt starts from was written after the training function had returned."""
        return self._loaded is not None and "result" in self._loaded.manifest.extra

    def finish_again(self) -> None:
        """Record a result that an earlier attempt made durable, and died before it could record it."""
        assert self._loaded is not None
        self._record_finished(self._loaded.manifest.extra["result"])

    def _record_finished(self, result: Any) -> None:
        self._session.pulse.stopping = True  # nothing is left that a time limit could interrupt
        self._session.record(Event.FINISHED, step=self.step, result=result)
        retry_on_full_disk(self._session, self._session.write_journal)

    def _export(self) -> None:
        """final/<name>.safetensors for each tracked module, complete or absent: the averaged weights where there are.

        All ranks take part, where each has a part of the weights; rank 0 writes.
        """
        modules = {n: value for n, value in self._tracking.objects.items() if isinstance(value, torch.nn.Module)}
        with ExitStack() as averages:
            for value in self._tracking.objects.values():
                if isinstance(value, torch.optim.Optimizer):
                    averages.enter_context(self.averaged(value))
            self._tracking.share_buffers()
            for name, module in modules.items():
                weights = whole_weights(module)
                if self.is_main:
                    write_weights(self._session.run.final, name, weights)
