"""What a function has given its optimizers and schedules, and which of it another run's function gives otherwise.

A run that starts from another's checkpoint goes on with the optimizer's state. Of its options, as the learning rate, a
value that the function gives now and the other run's did not give is wanted; what both give may have been moved by a
schedule since, and goes on where the checkpoint has it.
"""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from jobkit.train.optimizer_state import Names

Built = dict[str, Any]
"""Of an optimizer the options of each parameter by its name, of a schedule its state_dict: as they were made."""

Changes = dict[str, tuple[Any, Any]]
"""Option -> its value before, and now."""

_FOLLOWS = ("_last_lr",)
"""Of a schedule's state what follows from the rest, and from the step."""

_BY_THE_STEP = (LambdaLR, OneCycleLR, CosineAnnealingWarmRestarts)
"""Schedules whose get_lr tells the rate of a step by that step alone."""


def built(value: Any, names: Names) -> Built | None:
    """What an optimizer or schedule was given; None for another object. Before it is restored."""
    if isinstance(value, LRScheduler):
        return copy.deepcopy(value.state_dict())
    if not isinstance(value, torch.optim.Optimizer):
        return None
    options = [(keys, copy.deepcopy(_options(group))) for keys, group in _groups(value, names)]
    return {key: found for keys, found in options for key in keys}


def take_changes(value: Any, names: Names, before: Built, now: Built) -> Changes:
    """Give a restored optimizer or schedule what its function gives otherwise than before: {key: (before, now)}."""
    if isinstance(value, LRScheduler):
        value.load_state_dict(_with_changes(value.state_dict(), before, now))
        keys = [key for key in now if key in before and key not in _FOLLOWS]
        return {key: (before[key], now[key]) for key in keys if _differ(before[key], now[key])}
    changed: Changes = {}
    for keys, group in _groups(value, names):
        old, new = _of_any(keys, before), _of_any(keys, now)
        here = {key: (old[key], new[key]) for key in new if key in old and _differ(old[key], new[key])}
        group.update({key: copy.deepcopy(given) for key, (_, given) in here.items()})
        changed |= here
    return changed


def settle(schedule: LRScheduler, changed: Changes) -> None:
    """Set the rates of a restored schedule's optimizer to what it gives for its step, after `take_changes`.

    A LambdaLR always: its functions, which may know the number of steps, are in no checkpoint.
    """
    if not changed and not isinstance(_current(schedule), LambdaLR):
        return  # bit for bit what a resume would go on with
    rates = _rates(schedule)
    if rates is None and "base_lrs" in changed:
        pairs = zip(*changed["base_lrs"], schedule._last_lr, strict=True)
        rates = [last * now / before if before else now for before, now, last in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates or (), strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    if rates is not None:
        schedule._last_lr = list(rates)


def _current(schedule: Any) -> Any:
    """The one of several schedules in a row that is at work."""
    while isinstance(schedule, SequentialLR):
        schedule = schedule._schedulers[bisect_right(schedule._milestones, schedule.last_epoch)]
    return schedule


def _rates(schedule: Any) -> list[Any] | None:
    """What a schedule's formula gives for its step; None where it has none, but goes from step to step."""
    schedule = _current(schedule)
    formula = schedule.get_lr if isinstance(schedule, _BY_THE_STEP) else None
    formula = formula or getattr(schedule, "_get_closed_form_lr", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # get_lr advises get_last_lr, which is the checkpoint's
        return None if formula is None else list(formula())


def _groups(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each group with what it is known by: the names of its parameters, or its number where one has no name."""
    for number, group in enumerate(optimizer.param_groups):
        found = [names.get(parameter) for parameter in group["params"]]
        yield [str(one) for one in found] if found and None not in found else [f"~{number}"], group


def _of_any(keys: list[str], options: Built) -> dict[str, Any]:
    return next((options[key] for key in keys if key in options), {})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _with_changes(saved: Any, before: Any, now: Any) -> Any:
    """A saved value; where its function gives another than before, that."""
    if type(saved) is dict and type(before) is dict and type(now) is dict:
        keys = [*saved, *(key for key in now if key not in saved)]
        known = [key for key in keys if key in saved and key in before and key in now and key not in _FOLLOWS]
        rest = {key: saved[key] if key in saved else now[key] for key in keys}
        return rest | {key: _with_changes(saved[key], before[key], now[key]) for key in known}
    lists = all(type(one) in (list, tuple) for one in (saved, before, now))
    if lists and len(saved) == len(before) == len(now):
        return type(saved)(_with_changes(*parts) for parts in zip(saved, before, now, strict=True))
    return now if _differ(before, now) else saved


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) != float(other) if _is_number(one) and _is_number(other) else True
    try:
        return bool(one != other)
    except Exception:  # of a type that does not compare
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
