"""What a Trainer does otherwise under jobkit: its signals, its loaders, its loggers and the files it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.lightning.loader import ResumableLoader
from jobkit.lightning.logger import JobkitLogger
from jobkit.lightning.packages import lightning, part, slurm_environments

if TYPE_CHECKING:
    from jobkit.worker.context import Context


def leave_slurm_to_jobkit() -> None:
    """Have Lightning take the ranks from the environment that jobkit exports, under every launcher.

    Its own view of Slurm counts tasks that are not these ranks, requeues the job and loads `hpc_ckpt` files.
    """
    for environment in slurm_environments():
        environment.detect = staticmethod(lambda: False)


def leave_signals_to_jobkit(trainer: Any) -> None:
    """Lightning's handlers come before jobkit's: they broadcast within the handler, and requeue the job."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def resume_loaders(trainer: Any, *, waits: Callable[[], bool]) -> None:
    """Wrap the training's loaders as Lightning makes them; `waits`: whether they begin at a position not yet known."""
    strategy = trainer.strategy
    process = strategy.process_dataloader

    def wrap(loader: Any) -> Any:
        processed = process(loader)
        return ResumableLoader(processed, waits=waits()) if trainer.training else processed

    strategy.process_dataloader = wrap


def watch_making_of_loaders(trainer: Any, before: Callable[[], None]) -> None:
    """Call `before` each time before the script is asked for the training's loaders."""
    fit = trainer.fit_loop
    set_up = fit.setup_data

    def setup_data() -> None:
        if fit._combined_loader is None or fit._should_reload_train_dl:
            before()
        set_up()

    fit.setup_data = setup_data


def use_logger(trainer: Any, ctx: Context) -> None:
    """In TensorBoardLogger's place, or beside the script's others: one curve in the run directory."""
    kept, made = [], None
    for logger in trainer.loggers:
        if isinstance(logger, JobkitLogger):
            return
        if type(logger).__name__ != "TensorBoardLogger":
            kept.append(logger)
            continue
        _remove_empty(logger)
        if made is None:
            made = JobkitLogger(ctx, prefix=getattr(logger, "_prefix", ""))
            kept.append(made)
    trainer.loggers = kept if made is not None else [*kept, JobkitLogger(ctx)]
    if Path(trainer.default_root_dir) == Path.cwd():  # nobody has said where: not beside the code
        trainer._default_root_dir = str(Path(ctx.run_dir) / "lightning")


def _remove_empty(logger: Any) -> None:
    """Take back the folder that a TensorBoardLogger has made for nothing."""
    folder = Path(logger.log_dir)
    if logger._experiment is None or not folder.is_dir():
        return
    logger.experiment.close()
    logger._experiment = None
    files = list(folder.iterdir())
    if all(one.name.startswith("events.out.tfevents.") and one.stat().st_size < 200 for one in files):
        shutil.rmtree(folder)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


class CheckpointFiles(lightning.plugins.CheckpointIO):  # type: ignore[misc]
    """The files of checkpoints: jobkit's own are loaded whole, and the script's are those of steps that count.

    jobkit has written its own, so that they may hold what `weights_only` refuses: NumPy's numbers, hyperparameters.
    ModelCheckpoint's of a step after the one that an attempt goes on from are removed: they will be written again, and
    else be found beside them under another name, or as a `last.ckpt` of steps that were taken back.
    """

    def __init__(self, trainer: Any, ctx: Context) -> None:
        super().__init__()
        self._trainer = trainer
        self._io = trainer.strategy.checkpoint_io
        self._own_io = part(trainer, "plugins").TorchCheckpointIO()
        """For jobkit's own, at once: nobody would wait for an asynchronous one."""
        self._checkpoints = Path(ctx.run_dir) / "checkpoints"
        self._list = Path(ctx.run_dir) / "lightning" / "files.jsonl"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if self._is_own(path):
            self._own_io.save_checkpoint(checkpoint, path)
            return
        if self._trainer.is_global_zero:
            self._list.parent.mkdir(parents=True, exist_ok=True)
            with self._list.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self._trainer.global_step, "path": str(path)}) + "\n")
        self._io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, weights_only: bool | None = None, **options: Any) -> Any:
        if self._is_own(path):
            return self._own_io.load_checkpoint(path, weights_only=False)
        return self._io.load_checkpoint(path, *arguments, weights_only=weights_only, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self._io.remove_checkpoint(path)

    def teardown(self) -> None:
        self._io.teardown()

    def remove_after(self, step: int) -> None:
        """On rank 0: remove the files of steps after `step`, which this run has written."""
        if not self._list.exists():
            return
        written = [
            json.loads(line) for line in self._list.read_text(encoding="utf-8").splitlines() if line.endswith("}")
        ]
        newest = {one["path"]: one["step"] for one in written}
        for path in (path for path, last in newest.items() if last > step):
            self._io.remove_checkpoint(path)
        left = [one for one in written if newest[one["path"]] <= step]
        self._list.write_text("".join(json.dumps(one) + "\n" for one in left), encoding="utf-8")

    def _is_own(self, path: Any) -> bool:
        return Path(path).is_relative_to(self._checkpoints)


def watch_batches(trainer: Any, between: Callable[[], None]) -> None:
    """Call `between` before each batch is fetched: where Lightning's loops have left nothing half done."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or hasattr(fetcher, "between"):
        return
    kind: Any = type(fetcher)

    class Watched(kind):  # type: ignore[misc]
        def __next__(self) -> Any:
            self.between()
            return super().__next__()

    watched = Watched.__new__(Watched)
    watched.__dict__.update(vars(fetcher), between=between)
    trainer.fit_loop._data_fetcher = watched


def takes_batches_itself(trainer: Any) -> bool:
    """Whether training_step is given an iterator, and takes as many batches ahead as it likes."""
    return isinstance(trainer.fit_loop._data_fetcher, part(trainer, "loops.fetchers")._DataLoaderIterDataFetcher)
