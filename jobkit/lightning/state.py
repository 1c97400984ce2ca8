"""What one rank of a Trainer has in memory between two batches, and Lightning's own checkpoint does not hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jobkit.lightning.loader import own_states, set_own_states
from jobkit.lightning.packages import lightning, part
from jobkit.train.fields import is_of_framework
from jobkit.train.kept_attributes import KeptAttributes


def save(trainer: Any) -> dict[str, Any]:
    """The state of a trainer that is about to take the next batch; what holds it can be pickled."""
    fit, module = trainer.fit_loop, trainer.lightning_module
    fetcher, connector = fit._data_fetcher, trainer._logger_connector
    cycle = fit._combined_loader._iterator
    ahead = list(getattr(fetcher, "batches", []))
    return {
        "loop": fit.epoch_loop.state_dict(),
        "last_reload": fit._last_train_dl_reload_epoch,
        "fetcher": {"batches": ahead, "fetched": fetcher.fetched, "done": fetcher.done},
        "cycle": {name: vars(cycle)[name] for name in ("_idx", "_consumed") if name in vars(cycle)},
        "iterations": [one.state() for one in cycle.iterators],
        "validation": own_states(_validation_loaders(trainer)),
        "results": [_result_state(one) for one in fit.epoch_loop._results.values()],
        "connector": {name: copy.copy(vars(connector)[name]) for name in _OF_CONNECTOR},
        "metrics": {name: _metric_state(one) for name, one in _metrics(module)},
        "training": {name: one.training for name, one in module.named_modules()},
        "requires_grad": {name: one.requires_grad for name, one in module.named_parameters()},
        "gradients": _gradients(module),
    }


def load(trainer: Any, state: Mapping[str, Any]) -> None:
    """Put a trainer that is about to take its first batch where `save` found one. Its loops restart nothing then."""
    fit, module = trainer.fit_loop, trainer.lightning_module
    fetcher, connector = fit._data_fetcher, trainer._logger_connector
    fit._restarting = False  # else the epoch's end would leave out the plateau schedulers
    _load_loop(fit.epoch_loop, state["loop"], "")
    fit._last_train_dl_reload_epoch = state["last_reload"]
    cycle = fit._combined_loader._iterator
    for iteration, own in zip(cycle.iterators, state["iterations"], strict=True):
        iteration.place(own)
    vars(cycle).update(state["cycle"])
    vars(fetcher).update({name: value for name, value in state["fetcher"].items() if name in vars(fetcher)})
    set_own_states(_validation_loaders(trainer), state["validation"])
    for found in state["results"]:
        _restore_result(trainer, found)
    vars(connector).update(state["connector"])
    metrics = dict(_metrics(module))
    for name, values in state["metrics"].items():
        if name in metrics:
            _load_metric(metrics[name], values)
    for name, one in module.named_modules():
        one.training = state["training"].get(name, one.training)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(state["requires_grad"].get(name, parameter.requires_grad))
        if name in state["gradients"]:
            parameter.grad = state["gradients"][name].to(parameter.device)


_OF_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")


def _load_loop(loop: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Lightning's `load_state_dict` without its restart: that is for other places in its loops than this one."""
    loop._load_from_state_dict(dict(state), prefix)
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for name, child in vars(loop).items():
        if hasattr(child, "_load_from_state_dict") and hasattr(child, "reset_restart_stage"):
            _load_loop(child, state, f"{prefix}{name}.")


def _validation_loaders(trainer: Any) -> list[Any]:
    loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return list(loaders.flattened) if loaders is not None else []


def _gradients(module: Any) -> dict[str, torch.Tensor]:
    """Those that the next step may add to: Lightning's own loop clears them before, a loop by hand may not."""
    if module.automatic_optimization:
        return {}
    return {name: one.grad.detach().clone() for name, one in module.named_parameters() if one.grad is not None}


# What self.log has added up in this epoch


_OF_RESULT = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_computed", "_update_count")
_OF_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)


def _result_state(result: Any) -> dict[str, Any]:
    values = {name: vars(result)[name] for name in _OF_RESULT if name in vars(result)}
    if not result.is_tensor:  # a torchmetrics.Metric: of the module, where its state is, too
        values.pop("value")
    meta = result.meta
    return {
        "meta": {name: getattr(meta, name) for name in _OF_META} | {"reduce_fx": meta.reduce_fx.__name__},
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "values": {name: _detached(value) for name, value in values.items()},
    }


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _restore_result(trainer: Any, state: Mapping[str, Any]) -> None:
    results = part(trainer, "trainer.connectors.logger_connector.result")
    meta = results._Metadata(**state["meta"])
    meta.sync = results._Sync(fn=trainer.strategy.reduce, **state["sync"])
    result = results._ResultMetric(meta, state["is_tensor"])
    device = trainer.strategy.root_device
    for name, value in state["values"].items():
        setattr(result, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    if not state["is_tensor"]:
        owners = dict(trainer.lightning_module.named_modules())
        if meta.metric_attribute not in owners:
            return
        result.value = owners[meta.metric_attribute]
    key = f"{meta.fx}.{meta.name}" + (f".{meta.dataloader_idx}" if meta.dataloader_idx is not None else "")
    trainer.fit_loop.epoch_loop._results[key] = result


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """torchmetrics' Metrics, whose state is no part of a state_dict."""
    for name, one in module.named_modules():
        if hasattr(one, "_defaults") and hasattr(one, "_update_count"):
            yield name, one


def _metric_state(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.copy(getattr(metric, name)) for name in names}


def _load_metric(metric: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in metric._defaults or name.startswith("_"):
            setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)


# What modules, and the script's own data module and callbacks, keep as attributes


def kept_attributes(trainer: Any, *, one_disk: bool) -> KeptAttributes:
    """Of the modules, the data module and the callbacks that are not Lightning's own: those save what they need.

    A callback that has a state_dict of its own puts its averages of the weights in there.
    """
    module = trainer.lightning_module
    owners: dict[str, Any] = {}
    for name, one in module.named_modules():
        if not type(one).__module__.startswith("torchmetrics."):
            owners[f"module {name}"] = one
    if trainer.datamodule is not None:
        owners["data"] = trainer.datamodule
    apart: dict[str, list[str]] = {}
    for number, one in enumerate(trainer.callbacks):
        if is_of_framework(one):
            continue
        key = f"callback {number} {type(one).__qualname__}"
        owners[key] = one
        if type(one).state_dict is not lightning.Callback.state_dict:
            apart[key] = [name for name, value in vars(one).items() if hasattr(value, "state_dict")]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    saved = [trainer.model, module, *trainer.optimizers, *schedulers, *trainer.callbacks]
    return KeptAttributes(owners, saved, apart=apart, one_disk=one_disk)


def of_data(trainer: Any) -> KeptAttributes:
    """Of what is asked for the training's loaders."""
    module = trainer.lightning_module
    owners = {"module": module} | ({"data": trainer.datamodule} if trainer.datamodule is not None else {})
    return KeptAttributes(owners, [trainer.model, module], one_disk=False)
