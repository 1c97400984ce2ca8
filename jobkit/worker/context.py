"""jobkit.Context: what a training function is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run import secrets
from jobkit.run.events import Event
from jobkit.train.accumulation import BatchSize, Loss
from jobkit.train.data import Loader
from jobkit.train.engine import Engine
from jobkit.train.evaluate import Metrics, PerSample, as_scores, means
from jobkit.train.hooks import ForwardHook, uncompiled
from jobkit.train.parallel import unwrapped
from jobkit.train.seeds import derive_seed, preserved_generators, seed_generators
from jobkit.train.sharding import reshard
from jobkit.worker.checkpoint_schedule import CheckpointSchedule, MemorySchedule
from jobkit.worker.checkpointing import Checkpoints, find_memory
from jobkit.worker.evaluation import Evaluator
from jobkit.worker.export import export
from jobkit.worker.finish import retry_on_full_disk
from jobkit.worker.lease import holds_lease
from jobkit.worker.loop import TrainingLoop
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.results import flat, literal, numbers, to_json
from jobkit.worker.stop import CauseFinder, Stopped, kill_children
from jobkit.worker.tracked_state import TrackedState

Values = TypeVar("Values", torch.Tensor, Mapping[str, torch.Tensor])
"""One value a sample, [n], or several by name."""


class Context:
    """One rank's view of a run. See the README for a training function that uses all of it.

    Made by jobkit, on all ranks together: by `jobkit.init` in a script, by the worker for a task.
    """

    def __init__(
        self,
        rank: Rank,
        reporter: RunReporter,
        finder: CauseFinder,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        run, config, topology = rank.run, rank.config, rank.topology
        self.params: DictConfig = OmegaConf.create(literal(config.params))
        """The YAML's `params`, read-only."""
        OmegaConf.set_readonly(self.params, True)
        self.seed: int = config.seed
        self.rank: int = topology.rank
        """This process among all, from 0."""
        self.local_rank: int = topology.local_rank
        """This process among those of its node."""
        self.world_size: int = topology.world_size
        """The number of processes."""
        self.is_main: bool = rank.is_main
        """Whether this is rank 0, the one that writes files."""
        self.device: torch.device = rank.device
        """This rank's device."""
        self.attempt: int = rank.attempt
        """How many times the run has been started, this one included."""
        self.run_dir: Path = run.path
        """The run directory."""
        self._rank, self._reporter, self._signals = rank, reporter, finder.signals
        self.is_closed = False
        store = Store(run.checkpoints, attempt=str(rank.attempt))
        # Of their own: collectives of the writing thread must not be matched with the training's.
        everyone = RankGroup.of_world()
        ranks = RankGroup.of_parts(rank.disks) if rank.disks else everyone
        if ranks.is_main:
            store.clean()  # the lease is ours, and nobody writes yet
        earlier = run.status().attempts[:-1] if rank.is_main else []
        memory_schedule = MemorySchedule(config.checkpoint.memory)
        self._checkpointer = Checkpointer(
            store,
            ranks,
            keep=config.checkpoint.keep,
            may_publish=partial(holds_lease, run, rank.attempt),
            memory=None if memory_schedule.is_off or rank.disks else find_memory(rank, ranks, earlier),
            ranks_per_node=topology.local_world_size,
            disks=Disks(everyone, several=bool(rank.disks)),
        )
        self._engine = Engine(config, rank.device, topology.rank, topology.world_size, topology.local_world_size)
        restored = self._checkpointer.load_newest(names=())
        step, extra = (restored.step, restored.manifest.extra) if restored is not None else (None, {})
        self.has_returned = "result" in extra
        """Whether the checkpoint this attempt starts from was written after the training function had returned."""
        self._earlier_result = extra.get("result")
        self._tracked = TrackedState(
            self._engine.parallel, self._checkpointer, rank.group, restored, weights=config.checkpoint.weights
        )
        schedule = CheckpointSchedule(config.checkpoint, earlier)
        durable = restored.durable_step if restored is not None else None
        self._checkpoints = Checkpoints(
            rank, self._checkpointer, self._tracked, schedule, memory_schedule, reporter, durable
        )
        self._evaluator = Evaluator(rank, reporter, self._engine.parallel, finder.signals, step)
        self._loop = TrainingLoop(
            rank, self._engine, self._tracked, restored, self._checkpoints, reporter, finder, on_first_step
        )
        for damaged, reason in self._checkpointer.set_aside:
            reporter.record(Event.SET_ASIDE, step=damaged, reason=reason)
            if rank.is_main:
                log.info("the checkpoint of step %d is damaged and was set aside: %s", damaged, reason)
        for step_in_memory, reason in self._checkpointer.refused if rank.is_main else ():
            log.info("the snapshot of step %d in memory cannot be used: %s", step_in_memory, reason)
        seed_generators(derive_seed(self.seed, "init"), *rank.devices)  # equal on all ranks: equal initial weights
        reporter.start_metrics(extra.get("tensorboard", {}), self.step)

    # Where and who

    @property
    def step(self) -> int:
        """The step the loop is in, from 0; after the loop, the number of steps done."""
        return self._loop.step

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._rank.group.barrier()

    # The parts of a step

    def parallelize(self, module: nn.Module, **options: bool) -> nn.Module:
        """`module` on this rank's device and over the ranks as the YAML's `parallel:` says: DDP where it is silent.

        All ranks begin with the weights that rank 0 gives. What is on the meta device is drawn from the seed, by
        `init_weights()` or `reset_parameters()`. Make optimizers of what is returned. `options` are DDP's:
        find_unused_parameters, static_graph, broadcast_buffers, gradient_as_bucket_view. Raises UsageError for a
        module that cannot be spread that way or differs from rank 0's, and for options the strategy has no use for.
        """
        module = self._engine.parallelize(module, **options)
        self._tracked.add_module(module)
        self._watch(module)
        return module

    def _watch(self, module: nn.Module) -> None:
        self._loop.stragglers.watch(module, self._engine.parallel.forward_is_collective)

        def beat() -> None:
            if not torch.is_grad_enabled():  # many forwards without a step in between, as in sampling, are no hang
                self._reporter.heartbeat.beat()

        # A user may call what is inside, too; inside a compiled one hooks are not called.
        for one in {unwrapped(module), module}:
            one.register_forward_hook(ForwardHook(beat))

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)` for the model's trainable parameters: torch.optim.AdamW, fused_ema_adam ...

        With `parallel: zero1` each rank keeps the state of a part of them.
        """
        return self._engine.optimizer(model, make, **options)

    def loader(self, dataset: Any, *, global_batch_size: int = 0, **options: Any) -> Loader:
        """An endless iterator over this rank's shares of global batches of a Dataset or a stream (IterableDataset).

        The options are those of jobkit.train.data.Loader (shuffle, weights, name ...) and of torch's DataLoader
        (num_workers, collate_fn ...). Ranks that compute the same samples together, as those of a pipeline, get the
        same share. Raises JobkitError for options that do not fit.
        """
        if self._loop.is_in_step:
            raise UsageError(
                "ctx.loader comes before ctx.steps: one that is made later, no attempt would restore; for validation "
                "there is ctx.evaluate"
            )
        return self._engine.loader(dataset, global_batch_size=global_batch_size, **options)

    def autocast(self) -> AbstractContextManager[Any]:
        """The YAML's `precision` for the code inside: nothing for fp32, else torch.autocast."""
        return self._engine.autocast()

    def backward(
        self,
        model: nn.Module,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        micro_batch_size: int | None = None,
        global_batch_size: BatchSize | None = None,
    ) -> torch.Tensor:
        """Gradients of `loss(model(inputs), target)` over the global batch; returns its mean loss, on all ranks alike.

        `inputs` and `target` are this rank's share of a global batch: tensors [n, ...], or tuples of them (positional
        arguments) or dicts (by name). The share goes through in micro-batches of at most `micro_batch_size` samples,
        under `precision`'s autocast; the gradients are those of the whole global batch, exactly. `loss` returns the
        mean over the samples it is given.

        Without `global_batch_size` the share must be of as many samples as the loader's. For a batch of another size
        it is the number on all ranks together, or "sum": then the ranks add up what each was given, zero included,
        and wait for each other and the device to do so. Raises UsageError where the sizes do not fit.
        """
        self._loop.stragglers.timer.forward_begins()
        return self._engine.backward(
            model, inputs, loss, target, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> torch.Tensor | None:
        """Use the gradients of ctx.backward: unscale, clip to a global norm of `max_norm`, step, set them to None.

        Returns the norm before clipping; None without `max_norm`, unless fp16 needs it. Gradients that overflowed in
        fp16 are not used.
        """
        return self._engine.update(optimizer, max_norm=max_norm)

    def averaged(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """While inside, the parameters are their moving averages, where the optimizer keeps any. Collective."""
        return self._loop.unchanged_by(self._engine.averaged(optimizer))

    # State and loop

    def track(self, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> None:
        """Make objects part of the checkpoint, by name; where the run is being continued they are restored here.

        Anything with state_dict and load_state_dict. The state of `objects` is equal on all ranks, or a part of a whole
        that ctx.parallelize shares out: ranks that differ are an error of the first step. That of `per_rank`, as of a
        replay buffer or a data loader of one's own, is another on each rank, and is restored on as many ranks only.
        A rank may be asked for a state_dict when the others are not.
        Raises CheckpointError for one whose state does not fit.
        """
        if per_rank is not None and not isinstance(per_rank, Mapping):
            raise TypeError(f"ctx.track(per_rank=...): expected {{name: object}}, found {type(per_rank).__name__}")
        if self._loop.total is not None:
            raise UsageError("ctx.track comes before ctx.steps: what is tracked later, no attempt would restore")
        own = dict(per_rank or {})
        self._tracked.name_parameters({**objects, **own})
        for name, value in [*objects.items(), *own.items()]:
            self._tracked.check_name(name, value)
            if isinstance(value, torch.optim.Optimizer) and not hasattr(value, "_optimizer_step_pre_hooks"):
                raise UsageError(
                    f"ctx.track({name}=...): {type(value).__name__} is a torch.optim.Optimizer that has not called "
                    "Optimizer.__init__, so its steps cannot be seen: call super().__init__(params, defaults), or "
                    "derive it from nothing"
                )
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(f"ctx.track({name}=...): {type(value).__name__} has no state_dict and load_state_dict")
            self._tracked.add(name, value, per_rank=name in own)
            if isinstance(value, nn.Module) and uncompiled(value) is not value and value not in self._tracked.modules:
                self._watch(value)  # compiled after ctx.parallelize
            if isinstance(value, torch.optim.Optimizer):
                self._loop.watch(value)

    def steps(self, total: int) -> Iterator[int]:
        """Yield step numbers up to `total`, from where the run stands; checkpoint and stop in between as needed.

        A step ends where the loop asks for the next one. Raises Stopped, on every rank, after a signal to stop.
        """
        for step in self._loop.steps(total):
            yield step
            self._evaluator.end_step()

    # Logging

    def log(self, values: Mapping[str, Any]) -> None:
        """Scalars for TensorBoard at the current step, rank 0's: numbers, or one-element tensors, not synchronised.

        None is left out. Raises UsageError, on every rank, for what is not one number, as a DTensor whose parts the
        ranks have: log its full_tensor(), which all of them call.
        """
        self._reporter.log(values)

    def log_image(self, tag: str, image: torch.Tensor) -> None:
        """An image for TensorBoard at the current step: CHW, uint8 or float in [0, 1]."""
        self._reporter.log_media("image", tag, image)

    def log_video(self, tag: str, video: torch.Tensor) -> None:
        """A short video for TensorBoard at the current step, as an animated GIF: uint8 [T, C, H, W], C of 1 or 3."""
        self._reporter.log_media("video", tag, video)

    def log_text(self, tag: str, text: str) -> None:
        """A text for TensorBoard at the current step, which shows it as Markdown."""
        self._reporter.log_media("text", tag, text)

    # Evaluation

    @overload
    def evaluate(self, function: PerSample, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> float: ...

    @overload
    def evaluate(
        self, function: Metrics, dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> dict[str, float]: ...

    def evaluate(self, function: Any, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> Any:
        """The mean of `function(batch, ids)`, one value a sample, over the dataset; all ranks work, all get the same.

        A function that returns several, {name: [n]}, has a mean for each name. Batches of `batch_size` samples go to
        whichever rank is free. The training's random numbers are untouched, gradients are off. A signal to stop is
        obeyed in here too, where that repeats nothing: before a step has drawn a batch or a random number. So evaluate
        at the top of a step; the next attempt goes on with what has been computed.
        """
        return means(self.evaluate_samples(function, dataset, batch_size=batch_size, **options))

    def evaluate_samples(
        self, function: Callable[[Any, torch.Tensor], Values], dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> Values:
        """What `evaluate` takes the mean of: float64 [len(dataset)] by sample number, on the CPU of every rank."""
        scores = as_scores(function)
        return self._mapped(scores, dataset, batch_size=batch_size, **options)  # type: ignore[no-any-return]

    def map(
        self,
        function: Callable[[Any, torch.Tensor], Any],
        items: Sized | int,
        *,
        batch_size: int = 1,
        to: str = "all",
        **options: Any,
    ) -> Any:
        """What `function(batch, ids)` returns for all items, in their order; all ranks work, as in `evaluate`.

        `items` is a dataset, a sequence, or a number n for those from 0 to n - 1. `batch` is of up to `batch_size` of
        them, collated and on the device, `ids` are their numbers, int64 [n]. For n items `function` returns a tensor
        [n, ...], of one shape but for n, or a list of n objects that can be pickled (texts, tensors of any shapes), or
        a dict or tuple of such; None stands for None for each. The result has the same form: tensors
        [len(items), ...] on the CPU, lists of len(items).

        `to="all"` returns it on every rank, `to="main"` on rank 0 alone, and None on the others; rank 0 then has it
        twice until the step ends, for the case that a stop breaks off something else in it. Options, also those of
        `evaluate`: `num_workers` processes load batches ahead, with DataLoader's `prefetch_factor`, `worker_init_fn`
        and `multiprocessing_context`; `collate_fn` makes a batch of a list of items. What one rank's function raises is
        raised on all.
        """
        if to not in ("all", "main"):
            raise UsageError(f"ctx.map(to=...): found {to!r}, allowed: 'all', 'main'")
        given: Any = range(items) if isinstance(items, int) else items
        if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise UsageError(
                f"ctx.map: found a {type(items).__name__} as items, expected a dataset or a sequence, "
                "which has a length and numbered items, or how many there are: make a list of it"
            )
        return self._mapped(function, given, batch_size=batch_size, to_all=to == "all", **options)

    def _mapped(self, function: Callable[[Any, torch.Tensor], Any], items: Any, **options: Any) -> Any:
        with self._loop.unchanged_by(self._alike()):
            found = self._evaluator.run(
                function,
                items,
                step=self.step,
                place="in the step" if self._loop.is_in_step else "before the loop",
                equal=self._tracked.replicas(),
                may_stop=self._loop.may_stop_here,
                stop_if_told=self._loop.stop_if_told,
                **options,
            )
        for module in self._tracked.modules:
            reshard(module)  # else a parameter that is frozen or changed now is the gathered one
        self._loop.evaluated()
        return found

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """All ranks have the same buffers, and what is drawn on any of a rank's devices is not the training's."""
        with self._tracked.buffers.shared(self._tracked.replicas()), preserved_generators(*self._rank.devices):
            yield

    # The end

    def finish(self, result: Any = None) -> None:
        """Export the weights, make them, the state and `result` (JSON) durable, record the end, and close.

        All ranks together. A task's return does it; a script calls it.
        """
        in_loop = self._loop.total is not None
        if not in_loop and self._engine.made_something and self.is_main:
            log.info("the function returned without ctx.steps: there were no checkpoints")
        result = to_json(result)
        self._retry(lambda: export(self._rank, self._engine, self._tracked))
        self._reporter.log(numbers(result))
        self._reporter.hparams(flat(secrets.masked(self._rank.config.params)), numbers(result))
        self._reporter.end_step(self.step)
        if in_loop:  # the result goes to the disk before the event: an attempt that dies between them is not repeated
            self._retry(lambda: self._checkpoints.save(self.step, wait=True, extra={"result": result}))
        else:
            self._reporter.mark_metrics()()
        self._loop.report_progress()
        self._record_finished(result)
        self._reporter.say(f"finished at step {self.step}{f': {result}' if result is not None else ''}")

    def _record_finished(self, result: Any) -> None:
        self._reporter.heartbeat.stopping = True  # nothing is left that a time limit could interrupt
        self._reporter.record(Event.FINISHED, step=self.step, result=result)
        self._retry(self._reporter.write_journal)
        kill_children()
        self.close()

    def _retry(self, action: Callable[[], None]) -> None:
        retry_on_full_disk(self._rank.group, self._signals, action)

    # For the program around the training function

    def finish_again(self) -> None:
        """Record a result that an earlier attempt made durable, and died before it could record it; and close."""
        self._record_finished(self._earlier_result)

    @property
    def stopped(self) -> Stopped | None:
        """What all ranks have left the loop by, together, if they have."""
        return self._loop.stopped

    @property
    def loop_is_over(self) -> bool:
        """Whether no step is left to do, as for a function without a loop."""
        return self._loop.total is None or self.step == self._loop.total

    @property
    def durable_step(self) -> int | None:
        """Step of the newest checkpoint on the disk."""
        return self._checkpoints.durable_step

    def position(self) -> tuple[int | None, list[int]]:
        """(the step under way, None outside the loop; ids of the samples that this rank's loaders handed out last)."""
        samples = [sample for loader in self._engine.loaders for sample in loader.current_samples()]
        return (self.step if self._loop.is_in_step else None), samples

    def wait_for_checkpoint(self, seconds: float | None = None) -> None:
        """Give a checkpoint that is being written so long to become durable, for ever where None."""
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
