"""JobkitCallback, and what it puts in the place of a Trainer's own methods."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer as trainer_module
from torch.utils.data import IterableDataset
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.errors import UsageError
from jobkit.huggingface.arguments import parameters
from jobkit.huggingface.best import BestModels
from jobkit.huggingface.loader import ContinuedLoader, Position
from jobkit.huggingface.logs import of_all_attempts, result, tags
from jobkit.log import log
from jobkit.train.fields import is_of_framework, names_set_by
from jobkit.train.gradient_order import GradientOrder, known_orders, orders_of, settle_all
from jobkit.train.kept_attributes import KeptAttributes, Saved, on_device
from jobkit.train.loader_pass import data_loader
from jobkit.train.seeds import preserved_generators
from jobkit.worker.context import Context
from jobkit.worker.params import own_arguments
from jobkit.worker.script import init
from jobkit.worker.stop import STOP_SIGNALS

OLDEST = (5, 4)
"""The first transformers whose loop keeps its sum of losses, and where it begins, where they can be set."""


class JobkitCallback(transformers.TrainerCallback):
    """Brings a Trainer's training under jobkit: checkpoints, stops and curves are those of `jobkit.init`'s run.

        trainer.add_callback(job := JobkitCallback(trainer))
        trainer.train(resume_from_checkpoint=job.checkpoint)

    The run is one of the training arguments that decide the result, and of the script's own arguments, as
    `jobkit.init(params=..., seed=None)` makes it; a script that has called `jobkit.init` itself, or has the `ctx` of
    a task, goes on with that. Trainer's checkpoints and TensorBoard are replaced: checkpoints are taken as
    `checkpoint.every` says. The run is finished where the script ends without an error after `trainer.train`; an
    evaluation that follows it is repeated where it is interrupted.

    Raises UsageError for a transformers older than 5.4, and where trainer.train is not given the checkpoint.
    """

    def __init__(self, trainer: transformers.Trainer, ctx: Context | None = None) -> None:
        _check_version()
        self._trainer: Any = trainer
        had_handler = _take_out_own_saving(self._trainer)
        self.ctx: Context = (
            ctx or Context.current() or init(params={**parameters(trainer.args), **own_arguments()}, seed=None)
        )
        """The run's context, for what is logged besides and for a `finish(result)` of one's own."""
        if had_handler and self.ctx.is_main:
            log.info("enable_jit_checkpoint is off: at SIGTERM jobkit saves a checkpoint")
        if self.ctx.has_several_disks:
            trainer.args.save_on_each_node = True
        self._resumed: dict[str, Any] | None = None
        """What `_save` wrote besides Trainer's own files, on this rank; None where training begins."""
        self._first_step = 0
        """The step at which this attempt's loop began."""
        self._has_begun = self._is_over = False
        self._epoch = self._handed_out = 0
        """Where the loop stands: the epoch, and the batches that it has had of it."""
        self._skips_rest = False
        """Whether what follows the last step of an epoch was done before the checkpoint."""
        self._evaluation: dict[str, Any] | None = None
        """What the evaluation that is under way began with, where a stop may interrupt it."""
        self._has_evaluated = self._had_evaluated = False
        """Whether the run has evaluated; and, until this attempt has, whether an earlier one had."""
        self._loader: ContinuedLoader | None = None
        self._eval_loaders: dict[str, ContinuedLoader] = {}
        """Those of workers that outlive an evaluation, by the names that Trainer keeps them under."""
        self._eval_positions: dict[str, Position] = {}
        """Where they stood as the evaluation that is under way began, or in the checkpoint."""
        self._orders: list[GradientOrder] = []
        self._seconds, self._started = 0.0, 0.0
        self._buffers = {name: _version(value) for name, value in _buffers(self._trainer).items()}
        self._kept: KeptAttributes | None = None
        """From the first epoch on: what callbacks do as the training begins is the code's, and no change."""
        self._trained: dict[str, bool] = {}
        """By parameter, whether it was trained as the training began."""
        self._before_evaluation: Saved | None = None
        """What had been kept as the evaluation that is under way began."""
        self._put_back: Saved | None = None
        """What was kept at the place where the run goes on; callbacks' events up to there are of an earlier attempt."""
        self._bests = BestModels(self._trainer, self.ctx, self._write_model)
        self._wrap_methods()
        _let_loaders_continue()

    @property
    def checkpoint(self) -> str | None:
        """What trainer.train(resume_from_checkpoint=...) is to be given; None where the run begins."""
        return None if self.ctx.checkpoint is None else str(self.ctx.checkpoint)

    def _wrap_methods(self) -> None:
        trainer = self._trainer
        for name in (
            "get_train_dataloader",
            "get_eval_dataloader",
            "get_batch_samples",
            "_evaluate",
            "_maybe_log_save_evaluate",
        ):
            around = getattr(self, f"_around_{name.lstrip('_')}")
            setattr(trainer, name, functools.partial(around, getattr(trainer, name)))
        events = trainer.callback_handler
        for name in ("on_train_begin", "on_epoch_begin", "on_epoch_end"):
            setattr(events, name, functools.partial(getattr(self, f"_around_{name}"), getattr(events, name)))
        trainer._init_training_state = functools.partial(self._around_init_state, trainer._init_training_state)
        trainer._save_checkpoint = self._bests.keep
        trainer._load_rng_state = lambda checkpoint: None  # the checkpoint's are set by ctx.boundary

    def _boundary(self, *, again: bool = False) -> None:
        state = self._trainer.state
        if again or state.global_step != self.ctx.step:
            self.ctx.boundary(state.global_step, self._save, total=state.max_steps)

    # Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on where the run stands."""
        if self._has_begun and (self._is_over or state.global_step != self.ctx.step):
            raise UsageError("one trainer.train in a run: a second one would not know where it was resumed")
        if state.global_step != self.ctx.step:
            raise UsageError(
                f"the run stands at step {self.ctx.step} and Trainer begins at {state.global_step}: write "
                "trainer.train(resume_from_checkpoint=job.checkpoint), where job is the JobkitCallback"
            )
        self._first_step, self._started = state.global_step, time.monotonic()
        self._orders = orders_of(self._trainer.model_wrapped)
        self._boundary(again=True)
        self._has_begun = True
        if self._resumed is not None:
            args.eval_on_start = False  # it has been

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What follows is of an epoch that has had its batches."""
        self._epoch, self._handed_out = self._epoch + 1, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A stop does not wait for the end of an evaluation."""
        if self._evaluation is not None:
            self._boundary(again=True)
        else:
            self.ctx.heartbeat()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Log what Trainer logs, under the names that its own TensorBoard callback gives it."""
        logs = logs if logs is not None else {}
        if "train_runtime" in logs and self._trainer.is_in_train:  # the first thing that follows the loop
            self._is_over = True
            self._put_kept_back()
            self._boundary()
            self.ctx.end_loop(lambda: result(state))
            of_all_attempts(logs, self._seconds)
        elif not self._has_begun and self.ctx.step:
            return  # an evaluation before the training: an earlier attempt has logged it
        self.ctx.log(tags(logs), step=state.global_step)

    # Around Trainer's methods

    def _around_init_state(self, begin: Callable[..., tuple[int, int]], *arguments: Any) -> tuple[int, int]:
        """(epochs done, batches done of the next), which Trainer takes from the step: wrong for a stream read twice."""
        epoch, batches = begin(*arguments)
        self._resumed = self._read_own() if self.checkpoint is not None and not self._has_begun else None
        if self._resumed is not None:
            epoch, batches = self._resumed["epoch"], self._resumed["handed_out"]
            if self._resumed["is_over"]:
                epoch = sys.maxsize  # no epoch is left
        self._epoch, self._handed_out = epoch, batches
        return epoch, batches

    def _around_on_train_begin(self, begin: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        begins, folder = not self._has_begun, self.checkpoint
        control = begin(args, state, control)
        trainer = self._trainer
        self._trained = _trained(trainer)
        saved = [trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, trainer.accelerator]
        saved += [getattr(trainer.optimizer, "optimizer", None), getattr(trainer.lr_scheduler, "scheduler", None)]
        known = names_set_by(one for one in type(trainer).__mro__ if one.__module__.startswith("transformers."))
        self._kept = KeptAttributes(
            dict(_owners(trainer)), saved, apart={"Trainer": known}, one_disk=not self.ctx.has_several_disks
        )
        if self._resumed is not None:
            self._resume(self._resumed, control)
        elif begins and folder is not None and (first := self._read_rank(0)) is not None:
            self._kept.restore(first["kept"])  # of another number of ranks: rank 0's, for all
        return control

    def _around_on_epoch_begin(self, begin: Callable[..., Any], *arguments: Any) -> Any:
        self._boundary()  # what follows the last step of the epoch before is done
        return begin(*arguments)

    def _around_on_epoch_end(self, end: Callable[..., Any], *arguments: Any) -> Any:
        self._put_kept_back()  # no batch was left of the epoch
        return end(*arguments)

    def _put_kept_back(self) -> None:
        if self._put_back is not None and self._kept is not None:
            self._kept.restore(self._put_back)
        self._put_back = None

    def _around_get_train_dataloader(self, make: Callable[[], Any]) -> Any:
        self._loader = ContinuedLoader(make())
        return self._loader

    def _around_get_eval_dataloader(self, make: Callable[..., Any], eval_dataset: Any = None) -> Any:
        loader, args = make(eval_dataset), self._trainer.args
        base = data_loader(loader)
        if not args.dataloader_persistent_workers or base is None or isinstance(base.dataset, IterableDataset):
            return loader
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        known = self._eval_loaders.get(name)
        if known is None or known.loader is not loader:
            known = self._eval_loaders[name] = ContinuedLoader(loader)
            if name in self._eval_positions:
                known.continue_from(self._eval_positions[name])
        return known

    def _around_get_batch_samples(self, get: Callable[..., Any], iterator: Any, number: int, *rest: Any) -> Any:
        state, control = self._trainer.state, self._trainer.control
        begins = self._resumed is not None and state.global_step == self._first_step
        if begins and (control.should_training_stop or state.global_step >= state.max_steps):
            # Trainer looks for that after a step only.
            control.should_training_stop, self._skips_rest = True, self._handed_out == 0
            return [], None
        self._put_kept_back()
        self._boundary()
        batches, items = get(iterator, number, *rest)
        self._handed_out += len(batches)
        return batches, items

    def _around_maybe_log_save_evaluate(self, do: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if not self._skips_rest:
            do(*arguments, **options)

    def _around_evaluate(self, evaluate: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        state, control = self._trainer.state, self._trainer.control
        self._eval_positions = self._positions_of_evaluations()
        # A stream that ends within an accumulation leaves gradients for the next epoch's first step.
        if state.global_step and all(one.grad is None for one in self._trainer.model.parameters()):
            flags = {"should_save": control.should_save, "should_training_stop": control.should_training_stop}
            self._evaluation = {"rng": rng_state(self.ctx.device), "control": flags}
            self._before_evaluation = self._kept.snapshot() if self._kept is not None else None
            self._boundary(again=True)
        # Workers that outlive an evaluation draw their seeds once: those of this attempt are new.
        again = self._had_evaluated and self._trainer.args.dataloader_persistent_workers
        self._had_evaluated = False
        try:
            with preserved_generators(self.ctx.device) if again else nullcontext():
                return evaluate(*arguments, **options)
        finally:
            self._evaluation, self._before_evaluation, self._has_evaluated = None, None, True

    # Saving

    def _save(self, folder: Path) -> None:
        """Write what the next step needs; on all ranks together."""
        trainer = self._trainer
        self._write_model(folder)
        trainer._save_scaler(str(folder))
        torch.save(self._own(), folder / f"rank_{self.ctx.rank}.pt")
        if trainer.args.should_save:
            trainer.state.save_to_json(str(folder / trainer_module.TRAINER_STATE_NAME))
        self._bests.note_saved()

    def _write_model(self, folder: Path, *, optimizer: bool = True) -> None:
        self._trainer.save_model(str(folder), _internal_call=True)
        if optimizer:
            self._trainer._save_optimizer_and_scheduler(str(folder))

    def _own(self) -> dict[str, Any]:
        trainer = self._trainer
        changed = {
            name: value for name, value in _buffers(trainer).items() if _version(value) != self._buffers.get(name)
        }
        return {
            "world_size": self.ctx.world_size,
            "epoch": self._epoch,
            "handed_out": self._handed_out,
            "position": self._position(),
            "eval_positions": self._eval_positions if self._evaluation else self._positions_of_evaluations(),
            "is_over": self._is_over,
            "evaluation": self._evaluation,
            "has_evaluated": self._has_evaluated,
            # Where the loop is over it is in the sum of all, and Trainer adds it once more.
            "tr_loss": trainer._tr_loss.detach().cpu() * (not self._is_over),
            **{name: getattr(trainer, name) for name in _COUNTED},
            "callbacks": [(type(one).__name__, one.state()["attributes"]) for one in _exportable(trainer)],
            "buffers": {name: value.detach().cpu() for name, value in changed.items()},
            "trained": {name: one for name, one in _trained(trainer).items() if one != self._trained.get(name)},
            "kept": self._kept.changed(self._before_evaluation) if self._kept is not None else {},
            "orders": known_orders(self._orders),
            "seconds": self._seconds + time.monotonic() - self._started,
        }

    def _position(self) -> Position:
        assert self._loader is not None
        if self._resumed is not None and self._trainer.state.global_step == self._first_step:
            return dict(self._resumed["position"])  # the loader has not begun there yet
        return self._loader.position(is_mid=self._handed_out > 0)

    def _positions_of_evaluations(self) -> dict[str, Position]:
        now = {name: one.between_passes() for name, one in self._eval_loaders.items()}
        return {**self._eval_positions, **now}

    def _read_own(self) -> dict[str, Any] | None:
        """What this rank wrote; None where there were other ranks."""
        assert self.ctx.checkpoint is not None
        found = self._read_rank(self.ctx.rank)
        if found is None or found["world_size"] != self.ctx.world_size:
            if self.ctx.is_main:
                log.info("the checkpoint is of another number of ranks: the samples are not those that would have come")
            return None
        return dict(found)

    def _read_rank(self, rank: int) -> Any:
        assert self.ctx.checkpoint is not None
        file = self.ctx.checkpoint / f"rank_{rank}.pt"
        return torch.load(file, map_location=on_device(self.ctx.device), weights_only=False) if file.exists() else None

    def _resume(self, own: dict[str, Any], control: Any) -> None:
        trainer = self._trainer
        trainer._tr_loss.copy_(own["tr_loss"])
        for name in _COUNTED:
            setattr(trainer, name, own[name])
        trainer._initial_global_step = 0  # the mean loss is that of all steps
        self._seconds = own["seconds"]
        self._has_evaluated = self._had_evaluated = own["has_evaluated"]
        for (name, attributes), callback in zip(own["callbacks"], _exportable(trainer), strict=False):
            if type(callback).__name__ == name:
                vars(callback).update(attributes)
        buffers = _buffers(trainer)
        for name, value in own["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
        settle_all(self._orders, own["orders"])
        for name, one in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
            one.requires_grad_(own["trained"].get(name, one.requires_grad))
        assert self._kept is not None
        self._kept.restore(own["kept"], lambda rank: self._read_rank(rank)["kept"])
        if self._loader is not None:
            self._loader.continue_from(own["position"])
        self._eval_positions = own["eval_positions"]
        self._bests.find()
        if own["evaluation"] is not None:
            self._evaluate_again(own["evaluation"], control)
        if own["handed_out"] or own["is_over"]:
            self._put_back = self._kept.snapshot()  # the events of the epoch's begin come again

    def _evaluate_again(self, evaluation: dict[str, Any], control: Any) -> None:
        """The evaluation that a stop broke off, and what Trainer does after one."""
        trainer = self._trainer
        vars(control).update(evaluation["control"], should_log=False, should_evaluate=True)
        set_rng_state(evaluation["rng"], self.ctx.device)
        state = trainer.state
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model_wrapped, None, state.epoch, None, time.time()
        )


_COUNTED = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Trainer's attributes besides its state that decide what it logs next."""


def _check_version() -> None:
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        raise UsageError(
            f"jobkit.huggingface: found transformers {transformers.__version__}, it needs {OLDEST[0]}.{OLDEST[1]} or "
            "newer: pip install -U transformers"
        )


def _take_out_own_saving(trainer: Any) -> bool:
    """Its curves would be a second one, its handler of SIGTERM the only one; whether there was such a handler."""
    had_handler = False
    for callback in list(trainer.callback_handler.callbacks):
        is_handler = type(callback).__name__ == "JITCheckpointCallback"
        if is_handler or isinstance(callback, TensorBoardCallback):
            trainer.remove_callback(callback)
            had_handler = had_handler or is_handler
    if had_handler and Context.current() is not None:
        STOP_SIGNALS.install()  # the Trainer was made after jobkit.init
    return had_handler


def _let_loaders_continue() -> None:
    """Have Trainer ask a loader of ours to pass over batches; what accelerate does would draw other random numbers."""
    skip = trainer_module.skip_first_batches
    if getattr(skip, "is_of_jobkit", False):
        return

    @functools.wraps(skip)
    def skip_or_continue(dataloader: Any, num_batches: int = 0) -> Any:
        # Not isinstance: one of ours says that it is what it wraps.
        return dataloader if type(dataloader) is ContinuedLoader else skip(dataloader, num_batches)

    skip_or_continue.is_of_jobkit = True  # type: ignore[attr-defined]
    trainer_module.skip_first_batches = skip_or_continue


def _exportable(trainer: Any) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _owners(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Whose attributes Trainer does not save, by name."""
    yield "Trainer", trainer
    for number, callback in enumerate(trainer.callback_handler.callbacks):
        if not is_of_framework(callback):
            yield f"callback {number} {type(callback).__qualname__}", callback
    for name, module in trainer.accelerator.unwrap_model(trainer.model).named_modules():
        yield f"module {name}", module


def _trained(trainer: Any) -> dict[str, bool]:
    """Whether each parameter is trained, where each rank has the whole model."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return {}
    return {name: one.requires_grad for name, one in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}


def _buffers(trainer: Any) -> dict[str, torch.Tensor]:
    """The buffers of a model of which each rank has the whole."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return {}
    return dict(trainer.accelerator.unwrap_model(trainer.model).named_buffers())


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    """Another one after each change."""
    return id(buffer), buffer._version
