"""The state of a Trainer between two batches that Lightning's own checkpoint does not hold.

    on_train_start: ctx.track --load_state_dict--> kept
    first batch:    apply() --> loops' progress, place in the data, results of self.log, metrics, modes

callback.py makes one. The place between two batches is the only one that is saved, so that `apply` needs none of
Lightning's own ways to restart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from jobkit.log import log

SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
RESULT = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_computed", "_update_count")


class UnsavedState:
    """One rank's state, as ctx.track takes it."""

    def __init__(self, trainer: Any, *, with_weights: bool) -> None:
        self.trainer = trainer
        self.has_ended = False
        self.saved: Mapping[str, Any] | None = None
        """The checkpoint's, until the first batch."""
        self._with_weights = with_weights
        """True in `jobkit verify`: it compares them."""

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self.trainer, self.trainer.lightning_module
        state: dict[str, Any] = {"world_size": trainer.world_size, "weights": {}}
        if self._with_weights:
            optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
            state["weights"] = {"module": module.state_dict(), "optimizers": optimizers}
        if self.has_ended:
            return state
        fit = trainer.fit_loop
        fetcher, cycle = fit._data_fetcher, fit._combined_loader._iterator
        gradients = () if module.automatic_optimization else module.named_parameters()
        return state | {
            "loops": fit.epoch_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "reloaded": fit._last_train_dl_reload_epoch,
            "fetched": fetcher.fetched,
            "ahead": self._ahead,
            "done": fetcher.done,
            "cycle": {name: vars(cycle)[name] for name in ("_idx", "_consumed") if name in vars(cycle)},
            "places": [iteration.state(self._ahead) for iteration in cycle.iterators],
            "results": {key: _result_state(result) for key, result in fit.epoch_loop._results.items()},
            "shown": {name: vars(trainer._logger_connector)[name] for name in SHOWN},
            "metrics": _metric_states(module),
            "buffers": dict(module.named_buffers()),  # BatchNorm's differ by rank, and Lightning saves rank 0's
            "modes": {name: part.training for name, part in module.named_modules()},
            "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "gradients": {name: parameter.grad for name, parameter in gradients if parameter.grad is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.saved = state if "loops" in state else None

    @property
    def _ahead(self) -> int:
        """Batches that Lightning has fetched ahead, of a loader without a length."""
        return len(getattr(self.trainer.fit_loop._data_fetcher, "batches", ()))

    def sample_ids(self) -> list[int]:
        """Return the ids of this rank's samples in the newest batch."""
        loader = self.trainer.fit_loop._combined_loader
        iterators = loader._iterator.iterators if loader is not None and loader._iterator is not None else ()
        return [sample for iteration in iterators for sample in iteration.ids(self._ahead)]

    def apply(self) -> None:
        """Put the Trainer where the checkpoint was written: the next batch is about to be fetched."""
        if self.saved is None:
            return
        state, self.saved = self.saved, None
        trainer, module, fit = self.trainer, self.trainer.lightning_module, self.trainer.fit_loop
        fit._restarting = False  # else the epoch's end would leave out the plateau schedulers
        _load_progress(fit.epoch_loop, state["loops"], "")
        trainer.should_stop = state["should_stop"]
        fit._last_train_dl_reload_epoch = state["reloaded"]
        fetcher, cycle = fit._data_fetcher, fit._combined_loader._iterator
        if state["world_size"] == trainer.world_size:
            for iteration, place in zip(cycle.iterators, state["places"], strict=True):
                iteration.place(place)
        elif trainer.is_global_zero:
            log.warning("another number of ranks: the samples of the epoch under way are no longer exact")
        if state["ahead"]:
            fetcher.batches = [next(fetcher.iterator) for _ in range(state["ahead"])]
        vars(cycle).update(state["cycle"])
        fetcher.fetched, fetcher.done = state["fetched"], state["done"]
        vars(trainer._logger_connector).update(state["shown"])
        owners: dict[str, Any] = dict(module.named_modules())
        for key, result in state["results"].items():
            fit.epoch_loop._results[key] = _result_of(trainer, fit.epoch_loop._results, result, owners)
        for name, values in state["metrics"].items():
            vars(owners[name]).update(values)
            owners[name].to(trainer.strategy.root_device)
        for name, buffer in module.named_buffers():
            buffer.copy_(state["buffers"][name])
        for name, is_training in state["modes"].items():
            owners[name].training = is_training
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(state["trained"][name])
            if name in state["gradients"]:
                parameter.grad = state["gradients"][name].to(parameter.device)


def _load_progress(loop: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Load the counters of a loop and of those in it, and nothing of a restart."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, child in vars(loop).items():
        if hasattr(child, "_load_from_state_dict"):
            _load_progress(child, state, f"{prefix}{name}.")


def _result_state(result: Any) -> dict[str, Any]:
    """Return the sums of self.log under a name; a metric of torchmetrics keeps its state in the module."""
    names = RESULT if result.is_tensor else RESULT[2:]
    meta = {name: value for name, value in vars(result.meta).items() if name not in ("reduce_fx", "_sync")}
    return {
        "is_tensor": result.is_tensor,
        "meta": meta | {"reduce_fx": result.meta.reduce_fx.__name__},
        "sync": {"_should": result.meta.sync.should, "rank_zero_only": result.meta.sync.rank_zero_only},
        "values": {name: vars(result)[name] for name in names if name in vars(result)},
    }


def _result_of(trainer: Any, results: Any, state: Mapping[str, Any], owners: Mapping[str, Any]) -> Any:
    classes: Any = sys.modules[type(results).__module__]
    meta = classes._Metadata(**state["meta"])
    meta.sync = classes._Sync(fn=trainer.strategy.reduce, **state["sync"])
    result = classes._ResultMetric(meta, state["is_tensor"])
    vars(result).update(state["values"])
    result.to(trainer.strategy.root_device)
    if not state["is_tensor"] and meta.metric_attribute in owners:
        result.value = owners[meta.metric_attribute]
    return result


def _metric_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the states of the metrics of torchmetrics, which are no part of a state_dict."""
    return {
        name: {key: vars(part)[key] for key in (*part._defaults, "_update_count", "_computed", "_forward_cache")}
        for name, part in module.named_modules()
        if hasattr(part, "_defaults") and hasattr(part, "_update_count")
    }
