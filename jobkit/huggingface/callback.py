"""JobkitCallback: a Trainer's training in a run of jobkit's.

    Trainer --on_train_begin--> ctx.track(model, optimizer, scheduler, scaler, Progress): restored in place
            --on_step_begin---> ctx.boundary: saves, stops, and restores the generators at the first one
            --on_log----------> ctx.log

An evaluation belongs to the step before it: a stop within it goes back to the boundary before that step.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_callback import ExportableState

from jobkit.errors import UsageError
from jobkit.huggingface.data import TrainerPlaces, seed_batches
from jobkit.log import log
from jobkit.loop.context import Context

TIMES = ("_runtime", "_per_second", "_preparation_time")
"""Ends of the names of Trainer's values that measure time."""

COUNTED = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Attributes of a Trainer, besides its state, that decide the next logged values."""


STATE = ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
"""Fields of a Trainer's state that training changes; the others are the code's."""


class JobkitCallback(transformers.TrainerCallback):
    """Brings a Trainer's training under jobkit: its checkpoints, stops and curves are those of the run.

    ctx = jobkit.init(params={"lr": 1e-3})
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.add_callback(JobkitCallback(trainer))
    output = trainer.train()
    ctx.finish({"train_loss": output.training_loss})

    In a `task:` it is the ctx of the training function. Trainer's own checkpoints are off, and its TensorBoard;
    load_best_model_at_end keeps them, without optimizers. Raises UsageError where no run is open, and for FSDP and
    DeepSpeed.
    """

    def __init__(self, trainer: transformers.Trainer, ctx: Context | None = None) -> None:
        context = ctx or Context.current()
        if context is None:
            raise UsageError("JobkitCallback: no run is open; call ctx = jobkit.init() before, or give it a task's ctx")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise UsageError(
                "JobkitCallback takes one process or DDP; found FSDP or DeepSpeed in the training arguments"
            )
        self.ctx = context
        self._trainer: Any = trainer
        self._loop = context._loop
        self._has_begun = False
        self._total = 0
        self._places: TrainerPlaces | None = None
        self._ids: list[int] = []
        """Samples of the step under way."""
        trainer.remove_callback(TensorBoardCallback)
        self._train, self._trainer._inner_training_loop = self._trainer._inner_training_loop, self._resuming
        self._make, self._trainer.get_train_dataloader = trainer.get_train_dataloader, self._train_loader
        self._make_eval, self._trainer.get_eval_dataloader = trainer.get_eval_dataloader, self._eval_loader

    # Around the Trainer's own methods

    def _resuming(self, *arguments: Any, **options: Any) -> Any:
        """Let Trainer begin where the run stands: it reads the number of steps from its own file."""
        if not self.ctx.step:
            return self._train(*arguments, **options)
        args, control = self._trainer.args, self._trainer.control
        args.eval_on_start = False  # the first attempt has done it
        state = transformers.TrainerState(
            global_step=self.ctx.step,
            train_batch_size=self._trainer._train_batch_size,
            stateful_callbacks=[*stateful_callbacks(self._trainer), control],
            **{name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")},
        )
        with tempfile.TemporaryDirectory() as folder:
            state.save_to_json(str(Path(folder) / "trainer_state.json"))
            return self._train(*arguments, **(options | {"resume_from_checkpoint": folder}))

    def _train_loader(self) -> Any:
        args, drill = self._trainer.args, self._loop.drill
        limit = drill.shorten * args.gradient_accumulation_steps if drill is not None and drill.shorten else None
        loader = self._make()
        self._places = self._seed(loader, limit)
        return loader

    def _eval_loader(self, *arguments: Any, **options: Any) -> Any:
        loader = self._make_eval(*arguments, **options)
        self._seed(loader)
        return loader

    def _seed(self, loader: Any, limit: int | None = None) -> TrainerPlaces | None:
        args = self._trainer.args
        return seed_batches(loader, args.seed if args.data_seed is None else args.data_seed, self.ctx.rank, limit)

    # Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore, and begin the loop."""
        trainer, ctx = self._trainer, self.ctx
        if self._has_begun:
            raise UsageError(
                "trainer.train: a run has one training, and this is its second call; give it a run of its own"
            )
        if state.global_step != ctx.step:
            raise UsageError(
                f"trainer.train begins at step {state.global_step}, and the run stands at {ctx.step}: "
                "leave resume_from_checkpoint out, jobkit restores by itself"
            )
        self._has_begun = True
        state.compute_steps(args, state.max_steps)  # a state that was read has parts of the whole as the code has them
        self._choose_saving(args)
        scaler = trainer.accelerator.scaler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # within accelerate's
        parts = {"model": trainer.model, "optimizer": optimizer, "scheduler": trainer.lr_scheduler}
        ctx.track(per_rank={"trainer": Progress(trainer)}, **parts, **({} if scaler is None else {"scaler": scaler}))
        drill = self._loop.drill
        self._total = state.max_steps if drill is None else min(state.max_steps, drill.steps)
        if drill is not None and drill.shorten and args.eval_strategy == "steps":  # else there is no eval_steps
            state.eval_steps = min(state.eval_steps, drill.shorten)
        if self._loop.trace is not None:
            self._loop.trace.samples = lambda: self._ids

    def _choose_saving(self, args: Any) -> None:
        if args.load_best_model_at_end:
            args.save_only_model = True  # its folders are needed for their weights alone
        elif args.save_strategy != "no":
            args.save_strategy = transformers.trainer_utils.SaveStrategy.NO
            if self.ctx.is_main:
                log.info("Trainer's own checkpoints are off: the run's take their place (checkpoint.every in a YAML)")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._places is not None:
            self._places.begin_epoch(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop between two steps. The batches of the next one are loaded; generators are restored here."""
        step, places = state.global_step, self._places
        evaluates = args.eval_strategy == "steps" and (step + 1) % state.eval_steps == 0
        if args.eval_strategy == "epoch" and places is not None:
            evaluates = (step + 1) % places.steps_of(args.gradient_accumulation_steps) == 0
        evaluates = evaluates or (args.eval_strategy != "no" and step + 1 == self._total)
        self.ctx.boundary(step, total=self._total, epoch=int(state.epoch or 0), evaluates=evaluates)
        if places is not None:
            self._ids = places.ids_of(step, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the training of `jobkit verify` after its steps."""
        if state.global_step >= self._total:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What follows until the next epoch is no step: an evaluation, other callbacks."""
        self._loop.outside()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop within an evaluation. Trainer makes as many of these steps on all ranks."""
        if not self._loop.outside():
            self.ctx._rank.beat_again()
        self._loop.stop_if_told()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation is a place at which `jobkit verify` interrupts."""
        if self._trainer.is_in_train and self._loop.call:
            self._loop.note_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Log Trainer's values, by the names of its TensorBoard; times get names with perf/."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        times = {f"perf/{name}": numbers[name] for name in numbers if name.endswith(TIMES)}
        self.ctx.log(rewrite_logs(_without_times(numbers)) | times)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last step is done, which may be an early one."""
        self.ctx.boundary(state.global_step, total=state.global_step, epoch=int(state.epoch or 0))


class Progress:
    """A Trainer's own progress on one rank: its state, sums, and the states of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Without times, which differ from run to run: verify compares the bits of everything that is saved.
        history = [_without_times(values) for values in trainer.state.log_history]
        return {
            "state": json.dumps({name: getattr(trainer.state, name) for name in STATE} | {"log_history": history}),
            "tr_loss": trainer._tr_loss,
            "counted": {name: getattr(trainer, name) for name in COUNTED},
            "callbacks": [json.dumps(callback.state()["attributes"]) for callback in stateful_callbacks(trainer)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        vars(trainer.state).update(json.loads(state["state"]))
        best = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.best_global_step}"
        trainer.state.best_model_checkpoint = str(best) if best.is_dir() else None
        trainer._tr_loss.copy_(state["tr_loss"])
        vars(trainer).update(state["counted"])
        trainer._initial_global_step = 0  # the mean loss is one of all steps
        for callback, attributes in zip(stateful_callbacks(trainer), state["callbacks"], strict=False):
            vars(callback).update(json.loads(attributes))


def stateful_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks that have a state of their own, as EarlyStoppingCallback."""
    return [item for item in trainer.callback_handler.callbacks if isinstance(item, ExportableState)]


def _without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.endswith(TIMES)}
