"""Lightning's logger of a run: what `self.log` logs is one curve in the run directory, over all attempts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.lightning.packages import lightning

DummyExperiment: Any = lightning.loggers.logger.DummyExperiment

if TYPE_CHECKING:
    from jobkit.worker.context import Context


class JobkitLogger(lightning.loggers.Logger):  # type: ignore[misc]
    """Values at the step that Lightning gives them, through `ctx.log`."""

    def __init__(self, ctx: Context, prefix: str = "") -> None:
        super().__init__()
        self._ctx, self._prefix = ctx, f"{prefix}-" if prefix else ""
        self._epoch: tuple[int | None, float] | None = None
        """The last (step, epoch): Lightning logs it beside each other value, so several times at a step."""
        self._writer: Any = None

    @property
    def experiment(self) -> Any:
        """A SummaryWriter, as `self.logger.experiment.add_histogram(...)` uses it: rank 0's, into the same curves."""
        if not self._ctx.is_main:
            return DummyExperiment()
        if self._writer is None:
            self._writer = _writer(self._ctx)
        return self._writer

    @property
    def name(self) -> str:
        """No folder of its own."""
        return ""

    @property
    def version(self) -> str:
        """No folder of its own: what an attempt writes, the next one goes on with."""
        return ""

    @property
    def save_dir(self) -> str:
        """Where ModelCheckpoint puts its `checkpoints`, unless it has a `dirpath`."""
        return str(Path(self._ctx.run_dir) / "lightning")

    root_dir = save_dir

    @property
    def log_dir(self) -> str:
        """The folder of TensorBoard's event files."""
        return str(Path(self._ctx.run_dir) / "tensorboard")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Of rank 0: `ctx.log` writes no other's."""
        values = {f"{self._prefix}{name}": value for name, value in metrics.items() if not isinstance(value, dict)}
        if "epoch" in values and (epoch := (step, values["epoch"])) == self._epoch:
            del values["epoch"]
        elif "epoch" in values:
            self._epoch = epoch
        self._ctx.log(values, step=step if step is not None else self._ctx.step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """They are in the run's config.yaml, where the script gives them to the callback, and in each checkpoint."""


def _writer(ctx: Context) -> Any:
    """torch's SummaryWriter, whose summaries go where the context's do."""
    from torch.utils.tensorboard import SummaryWriter

    class Records:
        """What a SummaryWriter writes to."""

        def add_summary(self, summary: Any, global_step: int | None = None, walltime: float | None = None) -> None:
            ctx.log_summary(summary, step=ctx.step if global_step is None else int(global_step))

        def add_event(self, *_: Any, **__: Any) -> None:
            pass  # the beginning of a file

        add_graph = add_onnx_graph = add_event

        def flush(self) -> None:
            pass

        close = reopen = flush

        def get_logdir(self) -> str:
            return str(Path(ctx.run_dir) / "tensorboard")

    class Writer(SummaryWriter):  # type: ignore[misc]
        def _get_file_writer(self) -> Any:
            if self.all_writers is None or self.file_writer is None:
                self.file_writer: Any = Records()
                self.all_writers: Any = {self.file_writer.get_logdir(): self.file_writer}
            return self.file_writer

    return Writer(log_dir=str(Path(ctx.run_dir) / "tensorboard"))
