"""JobkitCallback: checkpoints, stops and curves of a Trainer by `ctx.boundary`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

import jobkit
from jobkit.errors import UsageError
from jobkit.lightning import state
from jobkit.lightning.packages import lightning
from jobkit.lightning.trainer import (
    CheckpointFiles,
    leave_signals_to_jobkit,
    leave_slurm_to_jobkit,
    resume_loaders,
    takes_batches_itself,
    use_logger,
    watch_batches,
    watch_making_of_loaders,
)
from jobkit.log import log
from jobkit.train.gradient_order import GradientOrder, known_orders, orders_of, settle_all
from jobkit.train.kept_attributes import KeptAttributes, Saved, on_device
from jobkit.worker.context import Context
from jobkit.worker.params import own_arguments

FILE = "lightning.ckpt"
"""Lightning's own checkpoint, in a checkpoint of jobkit's."""


class JobkitCallback(lightning.Callback):  # type: ignore[misc]
    """A Trainer's run is continued in the middle of an epoch, exactly, whatever has interrupted it.

        trainer = Trainer(callbacks=[job := JobkitCallback()], ...)
        trainer.fit(model, ckpt_path=job.checkpoint)

    It is made before the Trainer, for it makes the process group. `ctx` is the context of a script that has called
    jobkit.init; without one it calls that, with `options` (params, by default the script's arguments, name, runs_dir
    ...). When the script ends, the run has finished, with the metrics of the last epoch as its result; a script may
    call `job.ctx.finish(result)` itself.
    """

    def __init__(self, ctx: Context | None = None, **options: Any) -> None:
        leave_slurm_to_jobkit()
        if "config" not in options:
            options = {"params": own_arguments(), **options}
        self.ctx: Context = ctx or Context.current() or jobkit.init(**{"seed": None, **options})
        """The run's context, for what is logged besides and for a `finish(result)` of one's own."""
        self._trainer: Any = None
        self._state: dict[str, Any] | None = None
        """This rank's state in the checkpoint that the attempt begins with, until it is put in place."""
        self._kept: KeptAttributes | None = None
        self._of_data: KeptAttributes | None = None
        self._before_loaders: Saved = {}
        """What the objects that make the training's loaders had kept as they were asked for them last."""
        self._step: int | None = None
        """That of the last boundary."""
        self._has_ended = False
        self._orders: list[GradientOrder] = []

    @property
    def checkpoint(self) -> str | None:
        """For `trainer.fit(ckpt_path=...)`: Lightning's checkpoint that the run goes on from; None where it begins."""
        return str(self.ctx.checkpoint / FILE) if self.ctx.checkpoint is not None else None

    # Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over what jobkit owns, before Lightning restores anything."""
        leave_signals_to_jobkit(trainer)
        if stage != "fit":
            return
        if self._trainer is not None:
            raise UsageError(
                "jobkit.lightning: this is the second trainer.fit of the run, whose steps would be in no checkpoint: "
                "one fit a run; make it a script of its own"
            )
        self._trainer = trainer
        self._check_ranks(trainer)
        if self.ctx.checkpoint is not None:
            self._state = self._read(self.ctx.rank)
            if self._state is None or self._state.get("world_size") != self.ctx.world_size:
                self._state = None  # on all ranks: their loops count the same batches
                if self.ctx.is_main:
                    log.info("the checkpoint is of another number of ranks: its epoch begins anew, on other samples")
        use_logger(trainer, self.ctx)
        files = trainer.strategy.checkpoint_io = CheckpointFiles(trainer, self.ctx)
        if self.ctx.is_main:
            files.remove_after(self.ctx.step)
        resume_loaders(trainer, waits=lambda: self._state is not None)
        watch_making_of_loaders(trainer, self._before_making_of_loaders)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See that the script has passed the checkpoint on."""
        given = trainer._checkpoint_connector._ckpt_path
        if (given and str(given)) != self.checkpoint:
            begins = f"goes on from {self.checkpoint}" if self.checkpoint else "begins anew"
            raise UsageError(
                f"jobkit.lightning: the run {begins}, but trainer.fit was given ckpt_path={given!r}: write "
                "trainer.fit(..., ckpt_path=job.checkpoint); weights to begin with are loaded into the module before"
            )
        if self._state is not None and self._state["should_stop"]:
            trainer.should_stop = True  # an EarlyStopping had decided it

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin at the first batch: what Lightning restarts by itself is for other places in its loops."""
        if takes_batches_itself(trainer):
            raise UsageError(
                "jobkit.lightning: training_step(dataloader_iter) takes batches ahead, which no checkpoint would hold: "
                "write training_step(batch, batch_idx)"
            )
        trainer.fit_loop.epoch_loop._restarting = False
        watch_batches(trainer, self._between_batches)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Where loaders are made anew for an epoch."""
        watch_batches(trainer, self._between_batches)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is done."""
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """It may have had nothing to do: an earlier attempt had ended it."""
        if not self._has_ended:
            self._keep_attributes()
            self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After a test: a stop that came meanwhile is obeyed here."""
        if stage != "fit" and self._has_ended and not self.ctx.ending.is_closed and sys.exc_info()[0] is None:
            self._boundary(self.ctx.step)

    def on_validation_batch_end(self, *_: Any) -> None:
        """An evaluation is no hang."""
        self.ctx.heartbeat()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _before_making_of_loaders(self) -> None:
        """Loaders are made before the first batch is due, from attributes that are restored there: so it is twice."""
        if self._of_data is None:
            self._of_data = state.of_data(self._trainer)
        if self._state is not None:
            self._of_data.restore(self._state.get("before_loaders", {}))
        self._before_loaders = self._of_data.snapshot()

    # Between two batches

    def _between_batches(self) -> None:
        trainer = self._trainer
        step = trainer.global_step
        if self._step is None:
            self._begin(step)
        elif step > self._step:
            self._boundary(step)

    def _begin(self, step: int) -> None:
        """The first batch is about to be fetched: go on exactly where the checkpoint was written, at the same place."""
        self._keep_attributes()
        self._orders = orders_of(self._trainer.model)
        if self._state is not None:
            state.load(self._trainer, self._state)
            settle_all(self._orders, self._state["orders"])
            self._state = None
        self._boundary(step)  # the first: this rank's random numbers are restored in here

    def _keep_attributes(self) -> None:
        """From here on: what callbacks do as the training begins is the code's, and no change."""
        self._kept = state.kept_attributes(self._trainer, one_disk=not self.ctx.has_several_disks)
        if self._state is not None:
            self._kept.restore(self._state["kept"], lambda rank: dict(self._read(rank) or {})["kept"])
        elif self.ctx.checkpoint is not None and (first := self._read(0)) is not None:
            self._kept.restore(first["kept"])  # of another number of ranks: rank 0's, for all

    def _boundary(self, step: int) -> None:
        self._step = step
        self.ctx.boundary(step, self._save, total=self._total())

    def _total(self) -> int | None:
        total = self._trainer.estimated_stepping_batches
        return int(total) if math.isfinite(total) and total > 0 else None

    def _end(self) -> None:
        """The training is over, and durable; the script goes on, and may test what was trained."""
        self._has_ended = True
        self._boundary(self._trainer.global_step)
        metrics = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        self.ctx.end_loop(lambda: metrics)

    def _save(self, folder: Path) -> None:
        trainer = self._trainer
        trainer.save_checkpoint(folder / FILE)
        if self.ctx.has_several_disks and self.ctx.local_rank == 0 and not trainer.is_global_zero:
            content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            trainer.strategy.checkpoint_io.save_checkpoint(content, folder / FILE)
        found: dict[str, Any] = {"world_size": self.ctx.world_size, "should_stop": trainer.should_stop}
        assert self._kept is not None
        found["kept"] = self._kept.changed()
        if not self._has_ended:
            found |= state.save(trainer)
            found |= {"orders": known_orders(self._orders), "before_loaders": self._before_loaders}
        torch.save(found, folder / _rank_file(self.ctx.rank))

    def _read(self, rank: int) -> dict[str, Any] | None:
        """What a rank wrote; None where there was none."""
        assert self.ctx.checkpoint is not None
        file = self.ctx.checkpoint / _rank_file(rank)
        return torch.load(file, map_location=on_device(self.ctx.device), weights_only=False) if file.exists() else None

    # What must hold

    def _check_ranks(self, trainer: Any) -> None:
        if trainer.world_size == self.ctx.world_size:
            return
        ranks, devices, nodes = trainer.world_size, trainer.num_devices, trainer.num_nodes
        raise UsageError(
            f"jobkit.lightning: the Trainer is for {ranks} rank(s) (devices={devices}, num_nodes={nodes}), but "
            f"{self.ctx.world_size} were started. Start them by torchrun --nproc-per-node={devices} "
            f"{Path(sys.argv[0]).name}, or by a YAML with command: and resources: {{nodes: {nodes}, "
            f"tasks_per_node: {devices}}}; Lightning's own start of processes is not used"
        )


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
