"""JobkitCallback: checkpoints, stops and curves of a Trainer's run.

    Trainer.fit --fetches a batch--> _between --> ctx.boundary(step) --_save--> trainer.save_checkpoint
                                                                     --tracked--> UnsavedState (unsaved.py)
    Trainer.fit <--ckpt_path=job.checkpoint-- lightning.ckpt of the newest checkpoint

A boundary comes before a batch is fetched: there Lightning's loops have nothing half done, validations included.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.lightning.loader import ResumableLoader
from jobkit.lightning.logger import JobkitLogger
from jobkit.lightning.package import environments, lightning
from jobkit.lightning.unsaved import UnsavedState
from jobkit.log import log
from jobkit.loop.context import Context

FILE = "lightning.ckpt"
"""Lightning's own checkpoint, within a checkpoint of the run."""


class JobkitCallback(lightning.Callback):  # type: ignore[misc]
    """Continues a Trainer's run exactly, in the middle of an epoch too. It is made before the Trainer.

    ctx = jobkit.init()                                     # not in the function of a `task:`
    trainer = Trainer(callbacks=[job := JobkitCallback()], ...)
    trainer.fit(model, ckpt_path=job.checkpoint)
    ctx.finish()

    A step of the run is a batch after which an optimizer steps. Raises UsageError where there is no context.
    """

    def __init__(self, ctx: Context | None = None) -> None:
        current = ctx or Context.current()
        if current is None:
            raise UsageError("JobkitCallback(): call jobkit.init() before, or give it the ctx of the training function")
        # Else Lightning would count Slurm's tasks, requeue the job and load files of its own.
        environments.SLURMEnvironment.detect = staticmethod(lambda: False)
        self.ctx: Context = current
        # Before Lightning waits for ranks that nobody starts.
        environments.LightningEnvironment.validate_settings = lambda _, **sizes: self._check_size(**sizes)
        self._trainer: Any = None
        self._state: UnsavedState | None = None
        self._total: int | None = None
        self._step: int | None = None
        """Of the last boundary."""
        self._is_step_open = False
        """True where a validation comes between two batches of a step."""

    @property
    def checkpoint(self) -> str | None:
        """Lightning's checkpoint that the run continues from, for `trainer.fit(ckpt_path=...)`; None at its begin."""
        return str(self.ctx.checkpoint / FILE) if self.ctx.checkpoint is not None else None

    def _check_size(self, *, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.ctx.world_size:
            raise UsageError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}), and {self.ctx.world_size} "
                "rank(s) run: give it tasks_per_node and nodes of the YAML's `resources:`"
            )

    # Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before Lightning restores anything."""
        trainer._signal_connector.register_signal_handlers = lambda: None  # they would come before the run's
        if stage != "fit":
            return
        if self._trainer is not None:
            raise UsageError("this is the second trainer.fit of the run: a run has one; make the other one a run too")
        self._trainer = trainer
        self._check_size(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
        others = [logger for logger in trainer.loggers if type(logger).__name__ != "TensorBoardLogger"]
        trainer.loggers = [JobkitLogger(self.ctx), *others]
        files, process = trainer.strategy.checkpoint_io, trainer.strategy.process_dataloader
        load = files.load_checkpoint
        # The run's own checkpoint is read whole: hyperparameters may be any objects.
        files.load_checkpoint = lambda path, *more, **options: load(
            path, *more, **options | ({"weights_only": False} if str(path) == self.checkpoint else {})
        )
        trainer.strategy.process_dataloader = lambda loader: (
            ResumableLoader(process(loader)) if trainer.training else process(loader)
        )
        if (drill := self.ctx._loop.drill) is not None:
            batches = (drill.shorten or drill.steps) * trainer.accumulate_grad_batches
            limit, interval = trainer.limit_train_batches, trainer.val_check_interval
            trainer.limit_train_batches = min(limit, batches) if type(limit) is int else batches
            trainer.val_check_interval = min(interval, batches) if type(interval) is int else interval
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before Lightning restores its callbacks: a ModelCheckpoint drops the scores of another folder, as of Hydra's,
        which has the date in its name."""
        keepers = trainer.checkpoint_callbacks if trainer.ckpt_path == self.checkpoint else ()
        for keeper in (callback for callback in keepers if isinstance(callback, lightning.callbacks.ModelCheckpoint)):
            state = checkpoint["callbacks"].get(keeper.state_key, {})
            if (before := state.get("dirpath")) is not None and before != keeper.dirpath:
                state["dirpath"] = keeper.dirpath
                if trainer.is_global_zero:
                    log.warning(
                        "ModelCheckpoint has the folder %s now, and had %s: its scores are kept, and its files stay "
                        "there; hydra.run.dir=FOLDER, or the same dirpath=, keeps them in one",
                        *(keeper.dirpath, before),
                    )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has restored its checkpoint. Raises UsageError if it read another checkpoint, or none."""
        if (path := trainer.ckpt_path) != self.checkpoint and (path or self.checkpoint):
            raise UsageError(
                f"trainer.fit got ckpt_path={path!r}, and the run stands at step {self.ctx.step}: write trainer.fit("
                "..., ckpt_path=job.checkpoint), and load weights to begin with into the module. A callback that reads "
                "a checkpoint of its own, as LearningRateFinder, is for a script without jobkit"
            )
        loop = self.ctx._loop
        self._state = UnsavedState(trainer, with_weights=loop.drill is not None)
        self.ctx.track(per_rank={"lightning": self._state})
        if self._state.saved is not None:
            trainer.fit_loop.epoch_loop.restarting = False
        if loop.trace is not None:
            loop.trace.samples = self._state.sample_ids
        total = trainer.estimated_stepping_batches
        self._total = int(total) if pl_module.automatic_optimization and 0 < total < math.inf else None
        self._watch()

    def on_train_epoch_start(self, *_: Any) -> None:
        """Lightning may have made loaders anew."""
        self._watch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is done, and its metrics join the result."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self._step is not None and self._state is not None:
            self.ctx.boundary(step, self._save, total=step, epoch=trainer.current_epoch)
            self.ctx._checkpoints.results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._state.has_ended = True

    def on_train_epoch_end(self, *_: Any) -> None:
        """Until the next step the module's own hooks run, and validations: as long as they take."""
        self.ctx._loop.outside()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_step_open = self.ctx._loop.outside()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._is_step_open:  # batches of an accumulation follow
            self.ctx._rank.beat(self.ctx.step)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Tell the watchdog that a validation is no hang."""
        self.ctx._rank.beat_again()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    # Between two batches

    def _watch(self) -> None:
        """Have `_between` called before each batch is fetched."""
        fetcher = self._trainer.fit_loop._data_fetcher
        kind, between = type(fetcher), self._between

        def fetch(self: Any) -> Any:
            between()
            return kind.__next__(self)

        if not kind.__name__.startswith("Jobkit"):
            fetcher.__class__ = type(f"Jobkit{kind.__name__}", (kind,), {"__next__": fetch})

    def _between(self) -> None:
        trainer, drill = self._trainer, self.ctx._loop.drill
        if self._step is None and self._state is not None:
            self._state.apply()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if drill is not None and step >= drill.steps:
            trainer.should_stop = True
            raise StopIteration  # the epoch ends here, and the training with it
        if self._step is None or step > self._step:
            self._step = step
            self.ctx.boundary(step, self._save, total=self._total, epoch=trainer.current_epoch)

    def _save(self, folder: Path) -> None:
        self._trainer.save_checkpoint(folder / FILE)
