"""jobkit.Context: what a training function is given.

    Rank, Joined --> Context --> Parallelizer, GradientStep | Tracked, SaveSchedule, Loop, Epochs, Evaluator, Reporter

Each method passes its call on to one of these parts. All ranks make a Context together, and call its methods together
unless a docstring says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.checkpoint import framework_files
from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.disks import disks_of
from jobkit.checkpoint.export import write_final
from jobkit.checkpoint.sources import Source
from jobkit.checkpoint.staging import RankPosition
from jobkit.data.loader import Loader
from jobkit.data.seeds import derive_seed, seed_generators
from jobkit.errors import CheckpointError, JobkitError, Stopped, UsageError
from jobkit.loop.calls import with_fitting_methods
from jobkit.loop.epochs import Batches, Epochs
from jobkit.loop.evaluation import Evaluator
from jobkit.loop.health import Health
from jobkit.loop.join import Joined
from jobkit.loop.loop import Every, Loop
from jobkit.loop.own_time import OwnTime
from jobkit.loop.rank import Rank
from jobkit.loop.repeated_steps import Repeats
from jobkit.loop.reporter import Reporter
from jobkit.loop.saving import Boundary, SaveSchedule, older_than
from jobkit.loop.step import GradientStep, evaluating
from jobkit.loop.timing import Timing
from jobkit.loop.tracked import Generators, PendingGradients, Tracked
from jobkit.loop.values import Values, replaced_by_restores
from jobkit.parallel.devices import devices_of
from jobkit.parallel.fsdp import UnexchangedGradients
from jobkit.parallel.parallelizer import Parallelizer
from jobkit.run.files import is_there
from jobkit.run.records import Origin
from jobkit.wire.pages import Phase, page_before, slots_of


@with_fitting_methods
class Context:
    """One rank's view of a run.

    def train(ctx: jobkit.Context):
        model = ctx.parallelize(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.params.lr)
        loader = ctx.loader(dataset, global_batch_size=256)
        ctx.track(model=model, optimizer=optimizer, loader=loader)
        for step in ctx.steps(1000):
            loss = ctx.backward(model, next(loader), nn.functional.cross_entropy)
            ctx.update(optimizer)
            ctx.log({"train/loss": loss})
        return {"loss": loss.item()}
    """

    _current: Context | None = None

    def __init__(self, rank: Rank, joined: Joined, environ: Mapping[str, str]) -> None:
        config = rank.config
        self.params: DictConfig = OmegaConf.create(rank.params)
        """The YAML's `params`, read-only; `OmegaConf.to_container(ctx.params)` is a dict."""
        OmegaConf.set_readonly(self.params, True)
        self.seed: int = config.random_seed or 0
        """The YAML's `seed`, as a number; 0 for null."""
        self.rank: int = rank.rank
        """The number of this process among all ranks, from 0."""
        self.local_rank: int = rank.local_rank
        """Its number among the ranks of its node."""
        self.world_size: int = rank.world_size
        """The number of ranks."""
        self.is_main: bool = rank.rank == 0
        """True on rank 0, the rank that writes files."""
        self.device: torch.device = joined.device
        """The device of this rank, as `cuda:3`."""
        self.attempt: int = rank.attempt
        """How many times the run has been started, this one included."""
        self.run_dir: Path = rank.run.path
        """The run's directory; files of your own belong in `outputs/` below it, which exists."""
        rank.run.outputs.mkdir(exist_ok=True)
        self._rank, self._ranks = rank, joined.ranks
        self._devices = [joined.device]
        """The devices whose generators this rank has: its own, and those of tracked tensors."""
        position = RankPosition(
            rank.rank, rank.world_size, rank.local_world_size, disks_of(rank.run.path, rank, joined.ranks)
        )
        self._checkpointer = Checkpointer(
            rank.run.checkpoints,
            joined.ranks,
            position,
            attempt=rank.attempt,
            keep=config.checkpoint.keep,
            check_lease=rank.check_lease,
            beat=rank.beat_again,
            note_snapshot=rank.page.note_snapshot,
            slots=slots_of(environ),
            before=joined.ranks.broadcast(older_than(rank) if self.is_main else None),
            best_mode=config.checkpoint.best.mode if config.checkpoint.best is not None else "min",
            device=joined.device,
        )
        restored = self._checkpointer.restored
        start = joined.ranks.broadcast(rank.run.start() if self.is_main else None)
        self._is_start = restored is not None and start is not None and start.begins(restored.step)
        if restored is None and start is not None:
            self._take_weights(start)
        self._reporter = Reporter(rank)
        self._health = Health(ignores=config.on_nan == "ignore")
        self._parallelizer = Parallelizer(config, joined.device, joined.ranks, rank.local_world_size)
        self._step = GradientStep(config, self._parallelizer)
        self._tracked = Tracked(
            self._checkpointer, config.checkpoint.weights, is_local_sgd=self._parallelizer.is_local_sgd
        )
        self._tracked.code_options.is_start = self._is_start
        self._checkpoints = SaveSchedule(rank, self._checkpointer, self._tracked, self._reporter)
        timing = Timing(self._reporter, joined.device, self._step.loaders, lambda: self._tracked.optimizers)
        self._loop = Loop(
            rank,
            joined.ranks,
            self._tracked,
            self._checkpoints,
            self._reporter,
            self._health,
            timing,
            OwnTime(joined.device, rank.rank, rank.world_size),
            on_begin=self._begin_loop,
        )
        self._before = page_before(environ)
        # Ranks that compute the same samples together draw the same numbers.
        self._generators = Generators(config.random_seed, self._parallelizer.data_rank, rank.world_size, self._devices)
        self._averaged_step = 0
        if self._parallelizer.is_local_sgd:
            self._loop.before_boundary = self._average_replicas
        else:
            self._loop.before_boundary = lambda step, is_last: self._parallelizer.reshard_gathered()
        self._tracked.reshard = self._parallelizer.reshard
        self._tracked.check_frozen = self._parallelizer.check_frozen
        self._epochs = Epochs(self._loop, self._tracked, self._restore_again, self._devices, rank.rank, rank.world_size)
        self._evaluator = Evaluator(rank, self._parallelizer, self._tracked, self._reporter, self._loop)
        self._values: Values | None = None
        self.result: Any = None
        """The result of the run, once it has finished."""
        self.is_finished = False
        self.checkpoint: Path | None = None
        """The folder with the files that `save` of ctx.boundary wrote, of the checkpoint that this attempt begins
        with."""
        if restored is not None:
            self.checkpoint = framework_files.folder_of(restored.path)
        if self._loop.trace is not None:
            self._loop.trace.samples = lambda: self._samples()()
        if config.random_seed is not None:  # equal on all ranks, for equal initial weights
            seed_generators(derive_seed(config.random_seed, "init"), *self._devices)
        Context._current = self

    def _take_weights(self, start: Origin) -> None:
        """Begin with the weights of another run's checkpoint. Raises CheckpointError if the copy of --from is gone."""
        folder = self._rank.run.start_folder / self._rank.run.checkpoint(start.step).name
        if not start.weights_only or not is_there(folder):
            gone = f"the checkpoint of step {start.step} of {start.run}, which this run begins with, is gone"
            raise CheckpointError(f"{gone} from its directory: --from with --fresh takes it again")
        self._checkpointer.take_weights(folder)

    @classmethod
    def current(cls) -> Context | None:
        """Return the context of this process; None where there is none yet."""
        return cls._current

    @property
    def step(self) -> int:
        """The step that the loop is in, from 0; after the loop, the number of steps done."""
        return self._loop.boundary.step

    @property
    def batch(self) -> int:
        """The number of the batch in its epoch, from 0; before its loop, the number of the first batch to come."""
        return self._epochs.batch

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._ranks.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Within it, rank 0 runs first and the others after it: to download or prepare data once.

        with ctx.main_first():
            prepare(folder)      # finds it prepared on all ranks but the first
        """
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    # The parts of a step

    def parallelize(self, module: nn.Module, **options: bool) -> nn.Module:
        """Return the module on this rank's device, spread over the ranks as the YAML's `parallel:` says.

        All ranks begin with rank 0's weights. Parameters on the meta device are drawn from the seed, by
        `init_weights()` or `reset_parameters()`. Options are DDP's: find_unused_parameters, static_graph,
        broadcast_buffers, gradient_as_bucket_view. Raises UsageError for a module that cannot be spread.
        """
        module = self._parallelizer.parallelize(module, **options)
        self._loop.own_time.watch(module)
        return module

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Return `make(parameters, **options)` for the model's trainable parameters.

        optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=1e-3)
        """
        return self._parallelizer.optimizer(model, make, **options)

    def loader(self, dataset: Any, *, global_batch_size: int, **options: Any) -> Loader:
        """Return an endless iterator over this rank's parts of global batches of a dataset.

        Options: shuffle, weights, name, and DataLoader's num_workers, collate_fn, prefetch_factor ... The order is the
        same on any number of ranks. A dataset without a length is a stream: with `num_shards` and `shard(num_shards,
        index)` ranks divide its shards, else each rank reads all of it and keeps its share. A restart reads it again up
        to where it was, unless it has state_dict and load_state_dict. Raises UsageError for options that do not fit.
        """
        if self._loop.call:
            raise UsageError("ctx.loader comes before the loop: no attempt would restore one that is made later")
        name = str(options.pop("name", len(self._step.loaders)))
        if any(loader.name == name for loader in self._step.loaders):
            raise UsageError(f"ctx.loader: there is a loader with the name {name!r} already")
        loader = Loader(
            dataset,
            global_batch_size=global_batch_size,
            name=name,
            rank=self._parallelizer.data_rank,
            world_size=self._parallelizer.data_size,
            seed=self.seed,
            device=self.device,
            gather=self._ranks.gather,
            **options,
        )
        if self._loop.trace is not None:
            loader.see = self._loop.trace.see
        self._step.loaders.append(loader)
        return loader

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the YAML's `precision` as a context: torch.autocast, or nothing for fp32. Any rank may call it."""
        return self._step.autocast()

    def backward(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[..., Tensor],
        *,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> Tensor:
        """Add the gradients of `loss(model(inputs), target)` over the global batch; returns its mean loss.

        `batch` is this rank's share, (inputs, target): tensors [n, ...]; inputs may be a tuple (positional arguments)
        or a dict (by name). `loss` returns the mean over its samples. The share goes through in micro-batches of at
        most `micro_batch_size` samples, under `precision`'s autocast. The size of the global batch is the loader's,
        unless `global_batch_size` gives the samples on all ranks together. Raises UsageError where sizes do not fit.
        """
        sizes = {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
        if not isinstance(model, DistributedDataParallel):
            self._loop.own_time.waits()
        mean = self._step.backward(model, batch, loss, **sizes)
        self._tracked.is_weighted = True
        self._health.see(self.step, mean, self._samples())
        return mean

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> Tensor | None:
        """Use the gradients: unscale, clip to a global norm of `max_norm`, step, set them to None.

        Returns the norm before clipping; None without `max_norm`, unless fp16 needs it.
        """
        return self._step.update(optimizer, max_norm=max_norm)

    def averaged(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Within it, the parameters are their moving averages, where the optimizer keeps any."""
        return self._step.averaged(optimizer)

    @contextmanager
    def evaluating(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within it, the model is in evaluation mode, with averaged weights where the optimizer keeps any.

        At the end each submodule's mode, the weights and the random generators are as before.
        """
        with self._loop.evaluation(), evaluating(model, self._step.averaged(optimizer), self._devices):
            yield

    # State and loop

    def track(self, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> None:
        """Make objects part of the checkpoint, by name; where the run continues they are restored before this returns.

        Objects have state_dict and load_state_dict, or are torch.Generators. The state of `objects` is equal on all
        ranks; that of `per_rank` is another on each rank. All ranks track the same names. Raises UsageError, and
        CheckpointError for a state that does not fit.
        """
        if self._loop.call:
            raise UsageError("ctx.track comes before the loop: no attempt would restore what is tracked later")
        if per_rank is not None and not isinstance(per_rank, Mapping):
            raise UsageError(f"ctx.track(per_rank=...): expected {{name: object}}, found {type(per_rank).__name__}")
        for value in (*objects.values(), *(per_rank or {}).values()):
            self._parallelizer.watch(value)
            self._devices += [device for device in devices_of(value) if device not in self._devices]
        self._tracked.add(objects, per_rank or {})

    def values(self, **values: Any) -> Any:
        """Return plain values and tensors that are part of the checkpoint, as attributes. Before the loop, once.

        state = ctx.values(best=0.0)
        state.best = 1.0
        """
        if self._loop.call or self._values is not None:
            raise UsageError("ctx.values comes before the loop, and once: give all values in one call")
        self._values = Values(values)
        if replaced := replaced_by_restores(vars(self._values)):
            path, kind = replaced
            words = (
                f"ctx.values: {path} is a {kind}: a restore would replace it, and the script would keep the old "
                "one; ctx.track takes objects with state_dict and load_state_dict, jobkit.attributes(obj, 'a', 'b') "
                "makes state of others"
            )
            if self._checkpointer.restored is None:
                raise UsageError(words)
            self._reporter.warn(words)  # the run began before this was refused
        self._devices += [device for device in devices_of(values) if device not in self._devices]
        self._tracked.add({}, {"values": self._values})
        return self._values

    def steps(self, total: int, every: Every | None = None) -> Iterator[int]:
        """Yield step numbers from where the run stands up to `total`; save and stop in between as needed.

        `every={validate: 500}` calls functions, in order, at steps 0, 500 ... and once after the last. A dict that a
        function returns is logged; the last one joins the result. Raises Stopped, on every rank, after a signal to
        stop.
        """
        return self._loop.steps(total, every or {})

    def epochs(self, total: int, **objects: Any) -> Iterator[int]:
        """Yield epochs from where the run stands up to `total`; `objects` are for ctx.track.

        In the body, `for batch in ctx.batches(loader)` makes each batch a step. The lines before that loop run again
        when an attempt continues within an epoch: with the generators, and the numbers of ctx.values, that the epoch
        began with. What they change is undone. Raises Stopped as ctx.steps does.
        """
        self.track(**objects)
        return self._epochs.epochs(total)

    def batches(self, *loaders: Any) -> Batches:
        """Return the batches of a DataLoader of the script's own, in an epoch of ctx.epochs; of several, tuples.

        They come as the loader makes them, where it puts them. Its order and random numbers continue exactly in another
        attempt on as many ranks. A stream is read again, or goes on from its state_dict where it, or its loader, has
        one. An attempt within an epoch begins at its batch: `enumerate(ctx.batches(loader), ctx.batch)` numbers them.
        """
        return self._epochs.batches(loaders)

    def boundary(
        self,
        step: int,
        save: Callable[[Path], object] | None = None,
        *,
        total: int | None = None,
        epoch: int = 0,
        evaluates: bool = False,
    ) -> None:
        """Between two steps of a loop that is not jobkit's: `step` of them are done.

        The first call is at the step where the run stands, ctx.step, before the next one. Each later call saves and
        stops as ctx.steps does. `save(folder)` is called on all ranks where a checkpoint is written; another attempt
        finds its files in ctx.checkpoint. `epoch`, from 0, tells `verify` where epochs end. `evaluates`: an
        evaluation is part of the next step; a stop within it, at another call with this `step`, goes back to here.
        Raises Stopped, and UsageError where steps go down, or go on beyond those of a verification.
        """
        step = int(step)
        is_last = total is not None and step >= total
        self._checkpoints.write_files = save
        self._tracked.has_files = save is not None
        if not self._loop.call:
            if step != self.step:
                raise UsageError(
                    f"ctx.boundary({step}): the run stands at step {self.step}: load what ctx.checkpoint holds first, "
                    f"and call ctx.boundary({self.step}) before the next step"
                )
            self._loop.begin("ctx.boundary", total)
            if evaluates:
                self._loop.copy_for_rollback()
        elif step < self.step:
            raise UsageError(f"ctx.boundary({step}): {self.step} steps are done; steps only go up")
        elif (drill := self._loop.drill) is not None and step > drill.steps:
            raise UsageError(
                f"jobkit verify takes {drill.steps} steps, and this loop goes on: add a param with which it ends, as "
                f"params.steps={drill.steps}, to the command, or under `verify: {{params: ...}}` to the YAML"
            )
        elif step > self.step:
            self._loop.end_step(Boundary(step, epoch), is_last=is_last, due=evaluates)
        else:
            self._loop.stop_if_told()
        if is_last:
            self._loop.end()
        else:
            self._loop.begin_step()

    def _begin_loop(self) -> None:
        """Before the first step: check that everything is tracked, and restore jobkit's own state last."""
        self._tracked.check_ranks()
        made: list[tuple[str, Any]] = [
            ("the model of ctx.parallelize", module)
            for module in self._parallelizer.modules
            if any(parameter.requires_grad for parameter in module.parameters())
        ]
        made += [("the optimizer of ctx.optimizer", optimizer) for optimizer in self._parallelizer.optimizers]
        made += [("the loader of ctx.loader", loader) for loader in self._step.loaders]
        self._tracked.check_made(made)
        self._parallelizer.check_optimizers(self._tracked.optimizers)
        restored = self._checkpointer.restored
        if self._step.scaler is not None:
            self._tracked.add_own("scaler", self._step.scaler)
        if self.world_size > 1:
            self._parallelizer.orders.find(self._tracked.named_modules, self._parallelizer.modules)
            self._tracked.add_own("gradient_order", self._parallelizer.orders)
        for number, compression in enumerate(self._parallelizer.compressions):
            self._tracked.add_own(f"compression{number}", compression)
        self._tracked.add_own("gradients", PendingGradients(self._tracked))
        if unexchanged := UnexchangedGradients(self._tracked.named_modules):
            self._tracked.add_own("unexchanged", unexchanged)
        if restored is None:
            self._generators.begin(self._ranks, self._rank)
        self._tracked.add_own("epochs", self._epochs)
        self._tracked.add_own("generators", self._generators)
        restored = self._checkpointer.restored  # an older one, where reading jobkit's own entries found damage
        self._loop.boundary = Boundary() if restored is None else self._checkpoints.begin_with(restored.manifest.extra)
        if not self._epochs.restores_again:
            self._tracked.check_names()
        self._tracked.check_plain_state()
        self._begin_reports(restored, Repeats(self._rank.page, self._before, self.step))

    def _average_replicas(self, step: int, is_last: bool) -> None:
        if is_last or step % self._rank.config.comm.local_sgd == 0:
            self._parallelizer.average(self._tracked.optimizers)
            self._averaged_step = step

    def _begin_reports(self, restored: Source | None, repeats: Repeats | None) -> None:
        # In another run's checkpoint it is the place in that one's curves.
        position = None if restored is None or self._is_start else restored.manifest.extra["tensorboard"]
        self._reporter.begin(self.step, position, repeats)

    def _restore_again(self) -> None:
        """At the first batch within an epoch: undo the changes of the lines before it."""
        begun = self._checkpointer.restored
        self._tracked.restore_again()
        if self._checkpointer.restored is not begun:
            raise JobkitError(
                "a checkpoint could not be read again within an epoch; the next attempt begins with an older checkpoint"
            )
        self._tracked.check_names()

    # Logging

    def log(self, values: Mapping[str, Any]) -> None:
        """Log numbers, or tensors and arrays of one element, to TensorBoard at the current step; None is left out. Any
        rank may call it; rank 0's are written.

        ctx.log({"train/loss": loss})
        """
        for name, value in self._reporter.log(self.step, values).items():
            if "loss" in name.rpartition("/")[2]:
                self._health.see(self.step, value, self._samples())

    def log_image(self, tag: str, image: Tensor) -> None:
        """Log an image [C, H, W] or [H, W], uint8 or float in [0, 1]."""
        self._reporter.image(self.step, tag, image)

    def log_video(self, tag: str, video: Tensor) -> None:
        """Log a short video [T, C, H, W], uint8 or float in [0, 1]."""
        self._reporter.video(self.step, tag, video)

    def log_text(self, tag: str, text: str) -> None:
        """Log a text, which TensorBoard shows as Markdown."""
        self._reporter.text(self.step, tag, text)

    # Evaluation

    def evaluate(self, function: Callable[[Any, Tensor], Any], dataset: Any, **options: Any) -> Any:
        """Return the mean of `function(batch, ids)` over a dataset, each sample once, on every rank.

        `function` returns one value a sample, [n], or a dict of such. Which rank computes which batch is decided on the
        way, and the result has the same bits on any number of ranks. Options: batch_size, collate_fn, num_workers.
        """
        return self._evaluator.evaluate(function, dataset, **options)

    def evaluate_samples(self, function: Callable[[Any, Tensor], Any], dataset: Any, **options: Any) -> Any:
        """Return the values of ctx.evaluate sample by sample, float64 [n], on every rank."""
        return self._evaluator.evaluate_samples(function, dataset, **options)

    def map(
        self, function: Callable[[Any, Tensor], Any], inputs: Any, *, to: str | Path = "main", **options: Any
    ) -> Any:
        """Return `function(batch, ids)` of all inputs, in their order; on rank 0, on `all` ranks, or in a folder.

        In a folder each batch is a file, `batch_<number>.pt`; an attempt that continues computes the files that are
        missing. Options: batch_size (1), collate_fn, num_workers.
        """
        return self._evaluator.map(function, inputs, to=to, **options)

    # The end

    def finish(self, result: Any = None) -> Any:
        """End the run: write the last checkpoint and `final/`; returns the whole result. A script calls it once, at its
        end; a training function returns its result instead.

        Raises Stopped where a stop was swallowed, and CheckpointError where the last checkpoint cannot be written.
        """
        if self._loop.stopped is not None:
            raise self._loop.stopped
        results = self._checkpoints.results
        if isinstance(result, Mapping) or (result is None and results):
            result = {**results, **(result or {})}
        if self._loop.call and self._tracked.entries:
            self._loop.check_health()
            if not self._loop.is_over and self._is_step_done():
                self._loop.leave(Boundary(self.step + 1, self._loop.boundary.epoch))
            elif not self._loop.is_over:
                self._loop.end()
            self._rank.beat(self.step, Phase.ENDING)
            if self._parallelizer.is_local_sgd and self._averaged_step != self.step:
                self._average_replicas(self.step, is_last=True)
            self._parallelizer.reshard()
            # final/ first: an attempt that begins with the last checkpoint finds the result there (`is_done`).
            modules = self._tracked.named_modules
            make_room = self._checkpointer.make_room
            with ExitStack() as averages:
                for value in self._tracked.objects.values():
                    if isinstance(value, torch.optim.Optimizer):
                        averages.enter_context(self._step.averaged(value))
                place = self._rank.run, modules, result, self._ranks, self._rank.check_lease, make_room
                self._checkpoints.with_room(lambda: write_final(*place))
            pending = self._checkpoints.copy_to_host(self._loop.boundary, is_last=True)
            self._checkpoints.write(pending, wait=True)
            self._checkpoints.offer_best(pending, self._loop.last_values)
        if not self._loop.call:  # a program that only evaluates logs as well
            self._begin_reports(self._checkpointer.restored, None)
        self._loop.write_end(result)
        self.result, self.is_finished = result, True
        self.close()
        return result

    def _is_step_done(self) -> bool:
        """Return whether a loop of ctx.boundary ended with a step, as by `if iter_num > max_iters: break`."""
        is_last = self._loop.total is not None and self.step + 1 == self._loop.total
        return self._loop.call == "ctx.boundary" and (is_last or bool(self._tracked.stepped))

    @property
    def is_done(self) -> bool:
        """True if the attempt before died after its last checkpoint: the lines after the loop would lack its values."""
        restored = self._checkpointer.restored
        is_last = restored is not None and not self._is_start and bool(restored.manifest.extra.get("is_last"))
        return is_last and bool(self._ranks.broadcast((self._rank.run.final / "result.json").exists()))

    def finish_again(self) -> Any:
        """Return the result that the attempt before has left in `final/`, without another call of the function."""
        file = self._rank.run.final / "result.json"
        self.result = self._ranks.on_main(lambda: json.loads(file.read_text(encoding="utf-8")))
        self.is_finished = True
        self.close()
        return self.result

    @property
    def stopped(self) -> Stopped | None:
        """The stop of this attempt; None while there was none."""
        return self._loop.stopped

    def close(self) -> None:
        """Write the last reports and wait for the last save; `finish` calls it."""
        self._reporter.end_step(self.step)
        self._reporter.close()
        if self.is_finished:
            self._reporter.finish(self.result)
        self._checkpointer.close()
        self._tracked.close()
        self._parallelizer.orders.close()

    def _samples(self) -> Callable[[], list[int]]:
        """Return a function that gives the ids of this rank's samples in the step under way, in later steps too: a loss
        on a device is read when others are under way."""
        places, batches = [(loader, loader.done) for loader in self._step.loaders], self._epochs.sample_ids

        def ids() -> list[int]:
            ids_of_loaders = [sample for loader, done in places for sample in loader.ids_of(done)]
            return ids_of_loaders or [sample for batch in batches for sample in batch]

        return ids
