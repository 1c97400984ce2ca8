"""jobkit.Context: what a training function is given, and the loop that survives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from jobkit.checkpoint.reader import Loaded
from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.errors import EXIT_RESUMABLE, CheckpointError, JobkitError
from jobkit.run.files import fsync_dir
from jobkit.runtime.pace import Pace
from jobkit.runtime.pulse import peak_bytes
from jobkit.runtime.results import flat, literal, numbers, to_json
from jobkit.runtime.saving import Saver, insist
from jobkit.runtime.session import Session
from jobkit.train.data import Loader, derive_seed, seed_generators
from jobkit.train.evaluate import PerSample, evaluate
from jobkit.train.parallel import data_parallel, unwrapped
from jobkit.train.step import Loss, backward


class Stopped(SystemExit):
    """Raised out of the loop, on every rank, after the checkpoint: this attempt is over, the run is not.

    A SystemExit, so that `except Exception` in a training function does not catch it, and a plain script ends with
    exit code 75.
    """

    def __init__(self, cause: str, step: int) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.cause = cause
        self.step = step


class Context:
    """One rank's view of a run. See the README for a training function that uses all of it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.params: DictConfig = OmegaConf.create(literal(session.config.params))
        """The YAML's `params`, read-only."""
        OmegaConf.set_readonly(self.params, True)
        self.seed: int = session.config.seed
        self.step: int = 0
        """The step the loop is in, from 0; after the loop, the number of steps done."""
        self._tracked: dict[str, Any] = {}
        self._made: list[tuple[str, Any]] = []
        """What ctx.parallelize and ctx.loader made: a checkpoint without it would be worthless."""
        self._loaded: Loaded | None = session.checkpointer.load_newest()
        self._total: int | None = None
        self._logged: dict[str, Any] = {}
        self._images: list[tuple[str, torch.Tensor]] = []
        self._step_start: object = None
        """What the current step had touched when it began: nothing; None outside the loop."""
        self._optimizer_steps = 0
        self._pace = Pace()
        self.saver = Saver(session, self._loaded.step if self._loaded else None)
        for step, reason in session.checkpointer.set_aside:
            session.record("set_aside", step=step, reason=reason)
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

    # Building blocks

    def parallelize(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module` on this rank's device, its gradients averaged over the ranks (DDP) where there are several."""
        module = module.to(self.device)
        if self.world_size > 1:
            module = data_parallel(module, self.device)
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._made.append(("the model of ctx.parallelize", module))
        return module

    def loader(self, dataset: Dataset[Any], *, global_batch_size: int, **options: Any) -> Loader:
        """An endless iterator over this rank's shares of global batches; see jobkit.train.data.Loader."""
        place = {"rank": self.rank, "world_size": self.world_size, "device": self.device, "seed": self.seed}
        loader = Loader(dataset, global_batch_size=global_batch_size, **{**place, **options})
        self._made.append(("the loader of ctx.loader", loader))
        return loader

    def optimizer(
        self,
        model: torch.nn.Module,
        make: Callable[..., torch.optim.Optimizer],
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)` for the model's parameters, as `torch.optim.AdamW` or `fused_ema_adam`.

        With `parallel: zero1` each rank keeps the state of a part of them.
        """
        return make([parameter for parameter in model.parameters() if parameter.requires_grad], **options)

    def backward(
        self,
        model: torch.nn.Module,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Gradients of `loss(model(inputs), target)` over the global batch; returns the loss of this rank's share.

        `inputs` and `target` are this rank's share of a global batch: tensors [n, ...], or tuples or dicts of them.
        It goes through in micro-batches of at most `micro_batch_size` samples, under `precision`'s autocast; the
        gradients are those of the whole global batch, which is `global_batch_size` or the loader's. `loss` returns the
        mean over the samples it is given.
        """
        if global_batch_size is None:
            loaders = [value for _, value in self._made if isinstance(value, Loader)]
            if len(loaders) != 1:
                raise JobkitError(
                    f"ctx.backward takes the global batch's size from the loader, and there are {len(loaders)}: "
                    "pass global_batch_size"
                )
            global_batch_size = loaders[0].global_batch_size
        return backward(
            model,
            inputs,
            loss,
            target,
            global_batch_size=global_batch_size,
            data_ranks=self.world_size,
            micro_batch_size=micro_batch_size,
            autocast=self.autocast,
            unsynchronised=getattr(model, "no_sync", nullcontext),
        )

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip the gradients to a global norm of `max_norm`, take the optimizer's step, and set them to None.

        Returns the norm before clipping; None without `max_norm`.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = None if max_norm is None else torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def averaged(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """While inside, the parameters are their moving averages, where the optimizer keeps any."""
        averaged = getattr(optimizer, "averaged", None)
        return nullcontext() if averaged is None else averaged()

    def autocast(self) -> AbstractContextManager[Any]:
        """The YAML's `precision` for the code inside: nothing for fp32, torch.autocast for bf16."""
        if self._session.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

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
            if self._loaded:
                self._restore(name, value)
            self._tracked[name] = value
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_post_hook(self._count_optimizer_step)

    def _restore(self, name: str, value: Any) -> None:
        assert self._loaded is not None
        if name not in self._loaded.shared:
            raise CheckpointError(
                f"{self._loaded.path.name} has no {name!r} (it has: {', '.join(self._loaded.shared)}); "
                "the code tracks something the checkpoint was written without: undo that, or submit with --fresh"
            )
        try:
            unwrapped(value).load_state_dict(self._loaded.shared[name])
        except Exception as error:
            raise CheckpointError(
                f"{name} does not take its state from {self._loaded.path.name}: {error}; "
                "the code or the params that build it changed: undo that, or submit with --fresh"
            ) from error

    # The loop

    def steps(self, total: int) -> Iterator[int]:
        """Yield step numbers up to `total`, from where the run stands; checkpoint and stop in between as needed.

        A step ends where the loop asks for the next one. Raises Stopped, on every rank, after a notice to stop.
        """
        self._begin_loop(total)
        while self.step < total:
            self._step_start = self._fingerprint()
            yield self.step
            self.step += 1
            self._session.pulse.beat()
            self._flush_logs(self.step - 1)
            self._boundary()
        self._step_start = None
        self._session.pulse.end()

    def _begin_loop(self, total: int) -> None:
        if self._total is not None:
            raise JobkitError("ctx.steps is called once in a run: a second loop would not know where it was resumed")
        tracked = [unwrapped(value) for value in self._tracked.values()]
        for what, value in self._made:
            if not any(unwrapped(value) is one for one in tracked):
                raise JobkitError(
                    f"{what} is not tracked, so a run that is interrupted would lose it: "
                    "call ctx.track(model=..., optimizer=..., loader=...) before ctx.steps"
                )
        self._total = total
        if self._loaded:
            if missing := set(self._loaded.shared) - set(self._tracked):
                raise CheckpointError(
                    f"{self._loaded.path.name} has {', '.join(sorted(missing))}, which the code no longer tracks; "
                    "call ctx.track with it before ctx.steps, or submit with --fresh"
                )
            self._session.record("resumed", step=self.step, total_steps=total, checkpoint=self._loaded.path.name)
        else:
            self._session.record("resumed", step=0, total_steps=total, checkpoint=None)
        local = self._loaded.local if self._loaded else None
        if local is not None:
            set_rng_state(local["rng"], self.device)
        else:  # a new run, or a rank that the run did not have before: dropout differs from rank to rank
            seed_generators(derive_seed(self.seed, "train", self.rank, self.step))
        self._loaded = None  # its tensors are in the model by now
        self._report_progress()
        self._pace.start(self.step)
        self._session.pulse.begin()
        self.saver.start()

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
            told, by_time, slowest, peak = session.control.maximum(
                session.notices.pending, self.saver.is_due_by_time(), seconds, peak_bytes()
            )
            session.progress["peak_bytes"] = int(peak)
            due = due or bool(by_time)
            pace.agree_after(self.step, slowest)
            if told:
                self._stop_if_told()
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
        if self.saver.durable_step != self.step and self._total is not None:
            self._save(wait=True, must=False)
        self._session.record("interrupted", cause=cause, step=self.saver.durable_step or 0, reached=self.step)
        raise Stopped(cause, self.step)

    def _save(self, **options: Any) -> None:
        """Checkpoint the state as of `self.step` steps done; see Saver.save."""

        def state() -> tuple[dict[str, Any], Any]:
            shared = {name: unwrapped(value).state_dict() for name, value in self._tracked.items()}
            return shared, {"rng": rng_state(self.device)}

        self.saver.save(self.step, state, **options)

    def _fingerprint(self) -> tuple[object, ...]:
        """Changes as soon as a step draws a batch or a random number, or takes an optimizer's step."""
        positions = [value.position for value in self._tracked.values() if isinstance(value, Loader)]
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
        self._images = []

    def _log_performance(self) -> None:
        metrics, sample = self._session.metrics, self._pace.sample(self.step)
        if metrics is None or sample is None:
            return
        values: dict[str, Any] = {"perf/step_seconds": sample}
        loaders = [value for value in self._tracked.values() if isinstance(value, Loader)]
        if loaders:
            values["perf/samples_per_second"] = loaders[0].global_batch_size / sample
            values["perf/epoch"] = loaders[0].epoch
        for value in self._tracked.values():
            if isinstance(value, torch.optim.Optimizer):
                values["train/lr"] = value.param_groups[0]["lr"]
                break
        metrics.scalars(self.step - 1, values)

    def _report_progress(self) -> None:
        self._session.progress["step"] = self.step
        self._session.progress["total_steps"] = self._total
        self._session.progress["steps_per_second"] = self._pace.steps_per_second

    # Evaluation

    def evaluate(self, function: PerSample, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> float:
        """The mean of `function(batch, ids)`, one value a sample, over the dataset; all ranks work, all get the same.

        The training's random numbers are untouched. A notice to stop is obeyed in here too, where that repeats
        nothing: before a step has drawn a batch or a random number. So evaluate at the top of a step.
        """
        return evaluate(
            function,
            dataset,
            batch_size=batch_size,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            seed=self.seed,
            total=self._session.control.sum,
            between_batches=self._evaluation_boundary,
            **options,
        )

    def _evaluation_boundary(self) -> None:
        if self._total is not None and self._step_start is None:
            return  # after the loop: going on to the end is what is left to do
        self._pace.agree_next(self.step)
        self._session.pulse.beat()
        touched = self._step_start is not None and self._step_start != self._fingerprint()
        told, touched_anywhere = self._session.control.maximum(self._session.notices.pending, touched)
        if told and not touched_anywhere:
            self._stop_if_told()  # what this step has logged so far is dropped: it will be logged again

    # The end

    def finish(self, result: Any = None) -> None:
        """The function has returned: export the weights, and make them, the state and the result durable."""
        session = self._session
        if self._total is None and self.is_main:
            print("jobkit: the function returned without ctx.steps: there were no checkpoints", flush=True)
        result = to_json(result)
        insist(session, self._export)
        if session.is_main and session.metrics is not None:
            self._logged.update(numbers(result))
            session.metrics.hparams(flat(self.params), numbers(result))
        self._flush_logs(self.step)
        if self._total is not None:
            insist(session, lambda: self._save(wait=True, extra={"result": result}))
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
        self._session.record("finished", step=self.step, result=result)
        insist(self._session, self._session.write_journal)

    def _export(self) -> None:
        """final/<name>.safetensors for each tracked module, by rank 0: complete or absent."""
        if not self.is_main:
            return
        from safetensors.torch import save_model

        modules = {name: value for name, value in self._tracked.items() if isinstance(value, torch.nn.Module)}
        final = self._session.run.final
        final.mkdir(exist_ok=True)
        for name, module in modules.items():
            temporary = final / f".{name}.safetensors.tmp"
            save_model(unwrapped(module), str(temporary))
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(final / f"{name}.safetensors")
        fsync_dir(final)
