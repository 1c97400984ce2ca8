"""Lightning's logger whose values go to the run's TensorBoard: `self.log` --> log_metrics --> ctx.log.

callback.py adds it to the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobkit.lightning.package import lightning
from jobkit.loop.context import Context


class JobkitLogger(lightning.loggers.logger.Logger):  # type: ignore[misc]
    """Takes the place of the Trainer's TensorBoardLogger. An attempt cuts its curves back to its checkpoint."""

    name = version = ""
    save_dir = experiment = None  # properties of the base class

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.save_dir = str(ctx.run_dir / "lightning")
        """ModelCheckpoint writes here, unless it has a `dirpath`."""
        self.experiment = self
        self._ctx = ctx

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log at the run's step, on all ranks: `jobkit verify` compares the values of each."""
        self._ctx.log(metrics)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """They are in each checkpoint, and `params` in the run's config.yaml."""

    # For `self.logger.experiment.add_image(...)` of a module, as SummaryWriter has it. The step is the run's.

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        self._ctx.log({tag: scalar_value})

    def add_image(self, tag: str, img_tensor: Any, *_: Any, **__: Any) -> None:
        self._ctx.log_image(tag, img_tensor)

    def add_text(self, tag: str, text_string: str, *_: Any, **__: Any) -> None:
        self._ctx.log_text(tag, text_string)
