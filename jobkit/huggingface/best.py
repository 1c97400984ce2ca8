"""The models that a Trainer's load_best_model_at_end may load, in the run directory."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobkit.run.files import fsync_dir, fsync_file
from jobkit.worker.context import Context

BEST = "best"
"""Folder of the run directory for them."""

KEPT_BESTS = 4
"""Of how many of the newest checkpoints the best model is kept."""


class BestModels:
    """Those of a run. `write_model(folder, optimizer=...)` writes the Trainer's model, on all ranks together."""

    def __init__(self, trainer: Any, ctx: Context, write_model: Callable[..., None]) -> None:
        self._trainer, self._ctx, self._write_model = trainer, ctx, write_model
        self._saved: deque[int | None] = deque(maxlen=KEPT_BESTS)
        """The step of the best model, as the newest checkpoints have it: another attempt may begin with one of them."""

    def keep(self, model: Any, trial: Any = None) -> None:
        """In place of Trainer's own checkpoint: the weights alone, where they are the best so far."""
        trainer, state = self._trainer, self._trainer.state
        if state.best_global_step != state.global_step:
            return
        folder = self._folder(state.global_step)
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # whose weights are beside the optimizer's
        self._write_model(folder, optimizer=sharded)
        if trainer.args.should_save:
            _make_durable(folder)
        self._ctx.barrier()
        state.best_model_checkpoint = str(folder)
        kept = {folder.name, *(self._folder(step).name for step in self._saved if step)}
        for old in folder.parent.iterdir() if trainer.args.should_save else ():
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def note_saved(self) -> None:
        """A checkpoint has the best step so far."""
        self._saved.append(self._trainer.state.best_global_step)

    def find(self) -> None:
        """Tell Trainer where the best model is now: the runs directory may have been moved."""
        state = self._trainer.state
        if state.best_global_step and self._folder(state.best_global_step).exists():
            state.best_model_checkpoint = str(self._folder(state.best_global_step))
            self._saved.append(state.best_global_step)

    def _folder(self, step: int) -> Path:
        return self._ctx.run_dir / BEST / f"step_{step:08d}"


def _make_durable(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fsync_file(file)
    if folder.exists():
        fsync_dir(folder)
