"""jobkit.Context: what a training function is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from jobkit.checkpoint import own_files
from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.store import Store, not_of
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run import secrets
from jobkit.run.events import Event
from jobkit.run.rundir import owner_of
from jobkit.train.accumulation import BatchSize, Loss
from jobkit.train.data import Loader
from jobkit.train.engine import Engine
from jobkit.train.evaluate import Metrics, PerSample, as_scores, means
from jobkit.train.hooks import ForwardHook, uncompiled
from jobkit.train.parallel import unwrapped
from jobkit.train.seeds import preserved_generators
from jobkit.train.sharding import reshard
from jobkit.train.tracked_generator import TrackedGenerator, is_generator
from jobkit.worker.checkpoint_schedule import CheckpointSchedule, MemorySchedule
from jobkit.worker.checkpointing import Checkpoints, find_memory
from jobkit.worker.ending import Ending
from jobkit.worker.epochs import Batches, Epochs
from jobkit.worker.evaluation import Evaluator
from jobkit.worker.generators import begin_generators
from jobkit.worker.lease import holds_lease
from jobkit.worker.loop import TrainingLoop
from jobkit.worker.losses import suspect_of
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.results import flat, literal
from jobkit.worker.start_from import load_start
from jobkit.worker.state_names import VALUES
from jobkit.worker.stop import CauseFinder
from jobkit.worker.trackable import check_trackable, unprepared
from jobkit.worker.tracked_state import TrackedState
from jobkit.worker.values import Values

Scores = TypeVar("Scores", torch.Tensor, Mapping[str, torch.Tensor])
"""One value a sample, [n], or several by name."""


class Context:
    """One rank's view of a run. See the README for a training function that uses all of it.

    Made by jobkit, on all ranks together: by `jobkit.init` in a script, by the worker for a task.
    """

    _current: Context | None = None

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
        self.seed: int = config.seed or 0
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
        store = Store(run.checkpoints, attempt=str(rank.attempt))
        # Of their own: collectives of the writing thread must not be matched with the training's.
        everyone = RankGroup.of_world()
        ranks = RankGroup.of_parts(rank.disks) if rank.disks else everyone
        if ranks.is_main:
            store.clean()  # the lease is ours, and nobody writes yet
        before = run.status() if rank.is_main else None
        earlier = before.attempts[:-1] if before is not None else []
        found = (before.skip_samples, suspect_of(earlier, before.submissions)) if before is not None else None
        skipped, suspect = rank.group.broadcast(found)
        disks = Disks(everyone, several=bool(rank.disks))
        owner = rank.group.on_main(lambda: owner_of(run))
        memory_schedule = MemorySchedule(config.checkpoint.memory, earlier)
        self._checkpointer = Checkpointer(
            store,
            ranks,
            keep=config.checkpoint.keep,
            may_publish=partial(holds_lease, run, rank.attempt),
            memory=None if memory_schedule.is_off or rank.disks else find_memory(rank, ranks, earlier),
            ranks_per_node=topology.local_world_size,
            disks=disks,
            owner=owner,
        )
        sizes = topology.rank, topology.world_size, topology.local_world_size
        self._engine = Engine(config, rank.device, *sizes, skipped=skipped)
        restored = self._checkpointer.load_newest(names=())
        if restored is not None and (problem := not_of(owner, restored.manifest, restored.path)) is not None:
            raise UsageError(problem)
        start = load_start(rank, ranks, disks) if restored is None else None
        only_weights = start if config.start_from.weights_only else None
        extra = restored.manifest.extra if restored is not None else {}
        restored = restored or (None if only_weights else start)
        step = restored.step if restored is not None else None
        self._tracked = TrackedState(
            self._engine.parallel,
            self._checkpointer,
            rank.group,
            restored,
            weights=config.checkpoint.weights,
            only_weights=only_weights,
        )
        self._tracked.kept_workers.watch()
        schedule = CheckpointSchedule(config.checkpoint, earlier)
        durable = restored.durable_step if restored is not None else None
        self._checkpoints = Checkpoints(
            rank, self._checkpointer, self._tracked, schedule, memory_schedule, reporter, durable
        )
        self._evaluator = Evaluator(rank, reporter, self._engine.parallel, finder.signals, step)
        self._loop = TrainingLoop(
            rank,
            self._engine,
            self._tracked,
            restored,
            self._checkpoints,
            reporter,
            finder,
            end_evaluations=self._evaluator.end_step,
            on_first_step=on_first_step,
            suspect=suspect,
        )
        self.ending = Ending(
            rank,
            self._engine,
            self._tracked,
            self._loop,
            self._checkpoints,
            self._checkpointer,
            self._evaluator,
            reporter,
            self._signals,
            extra,
        )
        """For the program around the training function."""
        self._epochs = Epochs(rank, self._loop, self._tracked, restored)
        for damaged, reason in self._checkpointer.set_aside:
            reporter.record(Event.SET_ASIDE, step=damaged, reason=reason)
            if rank.is_main:
                log.info("the checkpoint of step %d is damaged and was set aside: %s", damaged, reason)
        for step_in_memory, reason in self._checkpointer.refused if rank.is_main else ():
            log.info("the snapshot of step %d in memory cannot be used: %s", step_in_memory, reason)
        self._tracked.first_generators = begin_generators(config.seed, restored, topology.world_size, *rank.devices)
        self.checkpoint: Path | None = None
        """The folder that `save` of ctx.boundary wrote, of the checkpoint this attempt begins with; None at the start.

        Verified on all ranks. With it a framework goes on where it stood.
        """
        if restored is not None and restored.snapshot is None:
            self.checkpoint = own_files.folder_in(restored.path, restored.manifest)
        own_seed = {} if config.seed is None else {"seed": config.seed}
        parameters = {**own_seed, **flat(secrets.masked(config.params))}
        reporter.start_metrics(extra.get("tensorboard", {}), self.step, parameters)
        reporter.start_mirrors(config.mirror.chosen)
        Context._current = self

    # Where and who

    @classmethod
    def current(cls) -> Context | None:
        """The context of this process, where one has been made: a process has one run."""
        return cls._current

    @property
    def has_several_disks(self) -> bool:
        """Whether nodes have disks of their own, so that one rank of each writes what every disk is to have."""
        return bool(self._rank.disks)

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
        self._beat_in(module)

    def _beat_in(self, module: nn.Module) -> None:
        def beat() -> None:
            if not torch.is_grad_enabled():  # many forwards without a step in between, as in sampling, are no hang
                self.heartbeat()

        # A user may call what is inside, too; inside a compiled one hooks are not called.
        for one in {unwrapped(module), module}:
            one.register_forward_hook(ForwardHook(beat))

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank is at work, as in a long validation that another framework makes.

        Steps, ctx.evaluate and the forwards of tracked modules do it by themselves.
        """
        self._reporter.heartbeat.beat()

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
                f"ctx.loader comes before {self._loop.call}: one that is made later, no attempt would restore; for "
                "validation there is ctx.evaluate"
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
        if self._loop.is_verified_now:
            own = [one for one in self._tracked.all_objects() if isinstance(one, TrackedGenerator)]
            more: dict[str, Any] = {"micro_batch_size": micro_batch_size, "devices": self._rank.devices}
            self._loop.verify(self._engine.computes_alike(model, inputs, loss, target, generators=own, **more))
        mean = self._engine.backward(
            model,
            inputs,
            loss,
            target,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            see=self._loop.see_share,
        )
        self._loop.see_mean(mean)
        return mean

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
        if self._loop.has_begun:
            raise UsageError(
                f"ctx.track comes before {self._loop.call}: what is tracked later, no attempt would restore"
            )
        own = {name: unprepared(value) for name, value in (per_rank or {}).items()}
        objects = {name: unprepared(value) for name, value in objects.items()}
        for name, value in [*objects.items(), *own.items()]:
            if not is_generator(value):
                check_trackable(name, value)
        self._tracked.states.name_parameters({**objects, **own})
        for name, value in [*objects.items(), *own.items()]:
            self._tracked.check_name(name, value)
            self._tracked.add(name, TrackedGenerator(value) if is_generator(value) else value, per_rank=name in own)
            if isinstance(value, nn.Module) and value not in self._tracked.states.modules:
                if uncompiled(value) is not value:
                    self._watch(value)  # compiled after ctx.parallelize
                else:
                    self._beat_in(value)
            if isinstance(value, torch.optim.Optimizer):
                self._loop.watch(value)

    def steps(self, total: int) -> Iterator[int]:
        """Yield step numbers up to `total`, from where the run stands; checkpoint and stop in between as needed.

        A step ends where the loop asks for the next one. Raises Stopped, on every rank, after a signal to stop.
        """
        return self._loop.until_left(self._loop.steps(total))

    def epochs(self, total: int, **tracked: Any) -> Iterator[int]:
        """Yield epochs up to `total`, from the one in which the run stands; `tracked` is for ctx.track.

        For a script's own loaders: in the body `for batch in ctx.batches(loader)` makes each batch a step, ctx.step,
        after which a checkpoint or a stop may come; an attempt goes on with the next batch of the epoch. The lines
        before it run again then, and what they change of tracked objects and random numbers is undone. Raises Stopped,
        on every rank, after a signal to stop.
        """
        self._loop.check_first()
        self.track(**tracked)
        self._loop.call, self._tracked.position = "ctx.epochs", self._epochs
        return self._loop.until_left(self._epochs.epochs(total))

    def batches(self, *loaders: Any) -> Batches:
        """The batches of a DataLoader of the script's own, in an epoch of ctx.epochs; of several, tuples.

        They come as the loader makes them, this rank's, where it puts them. Its order, the random numbers of samplers,
        datasets and workers go on in another attempt as they were, on as many ranks. `enumerate(ctx.batches(loader),
        ctx.batch)` counts them in an epoch. Any other iterable of batches is read again up to where it stood.
        """
        return self._epochs.begin_batches(loaders)

    def values(self, **values: Any) -> Any:
        """Plain values that are part of the checkpoint, as attributes: `state = ctx.values(best=0.0); state.best = 1`.

        Numbers, texts, None, and lists and dicts of such; given are those to begin with. Each rank has its own; on
        another number of ranks all go on with rank 0's. Before the loop, once.
        """
        if self._loop.has_begun:
            raise UsageError(f"ctx.values comes before {self._loop.call}: what is made later, no attempt would restore")
        if VALUES in self._tracked.own_objects:
            raise UsageError("ctx.values is called once: give all values in one call")
        found = Values(values)
        self._tracked.add(VALUES, found, per_rank=True)
        return found

    @property
    def batch(self) -> int:
        """The number of the batch in its epoch, from 0; before its loop, that of the first to come."""
        return self._epochs.batch

    def boundary(self, step: int, save: Callable[[Path], object] | None = None, *, total: int | None = None) -> None:
        """Between two steps of a loop that is not jobkit's: `step` of them are done. All ranks call it together.

        The first call is at the step where the run stands, ctx.step, before the next one: there this rank's random
        numbers and what is tracked go on. Each later call saves and stops as ctx.steps does. `save(folder)` is called
        on all ranks where a checkpoint is due, or a stop is agreed on: what the ranks write into `folder`, one for all
        ranks of a disk, is in the checkpoint, whole or not at all; another attempt finds it as ctx.checkpoint. A
        checkpoint holds what is tracked and each rank's random numbers besides. A call with the same step again looks
        for a stop, as after an evaluation. `total` steps are shown as the aim.

        Raises Stopped, on every rank, after a signal to stop, and UsageError where the first step is another.
        """
        self._loop.boundary(step, save, total)

    # Logging

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Scalars for TensorBoard at the current step, rank 0's: numbers, or one-element tensors, not synchronised.

        `step` is another one, as that of a framework which counts from 1. None is left out. Raises UsageError, on every
        rank, for what is not one number, as a DTensor whose parts the ranks have: log its full_tensor(), which all of
        them call.
        """
        self._reporter.log(values, step)
        self._loop.see_logged(values)

    def log_image(self, tag: str, image: torch.Tensor) -> None:
        """An image for TensorBoard at the current step: CHW, uint8 or float in [0, 1]."""
        self._reporter.log_media("image", tag, image)

    def log_video(self, tag: str, video: torch.Tensor) -> None:
        """A short video for TensorBoard at the current step, as an animated GIF: uint8 [T, C, H, W], C of 1 or 3."""
        self._reporter.log_media("video", tag, video)

    def log_summary(self, summary: Any, *, step: int) -> None:
        """What TensorBoard's own writer makes of anything, at a step: a `Summary`, as for a histogram or a figure."""
        self._reporter.log_summary(step, summary)

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
        self, function: Callable[[Any, torch.Tensor], Scores], dataset: Dataset[Any], *, batch_size: int, **options: Any
    ) -> Scores:
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
                place=self._loop.where,
                equal=self._tracked.replicas(),
                may_stop=self._loop.may_stop_here,
                stop_if_told=self._loop.stop_if_told,
                **options,
            )
        for module in self._tracked.states.modules:
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
        self._epochs.leave()
        self.ending.finish(result)

    def end_loop(self, result: Callable[[], Any]) -> None:
        """The loop of ctx.boundary is over: make a checkpoint of that, on all ranks together; the script may go on.

        Where it ends without an error, and without `finish`, the run is finished with what `result` returns then.
        Where it is interrupted, as in an evaluation, another attempt begins with this checkpoint.
        """
        self.ending.end_loop(result)
