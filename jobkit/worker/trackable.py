"""What ctx.track takes, and what to use for what it does not take."""

from __future__ import annotations

import inspect
import numbers
import random
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from jobkit.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def unprepared(value: Any) -> Any:
    """The torch optimizer or schedule within what accelerate's `prepare` makes of it, which has its state and no steps
    that can be seen; any other object itself."""
    if type(value).__module__.partition(".")[0] == "accelerate":
        for name, kind in (("optimizer", torch.optim.Optimizer), ("scheduler", torch.optim.lr_scheduler.LRScheduler)):
            if isinstance(found := getattr(value, name, None), kind):
                return found
    return value


def check_trackable(name: str, value: Any) -> None:
    """Raise, for an object that ctx.track(name=value) cannot keep, TypeError with what to write instead.

    UsageError for an optimizer whose steps cannot be seen.
    """
    if isinstance(value, type):
        raise TypeError(f"ctx.track({name}=...): {value.__name__} is a class; track the object that is made of it")
    if isinstance(value, DataLoader) and not _has_state(value):
        raise TypeError(
            f"ctx.track({name}=...): found a DataLoader, which has no position to keep: leave it out of ctx.track and "
            "write `for batch in ctx.batches(loader)`, or ctx.loader(dataset, global_batch_size=...)"
        )
    if isinstance(value, torch.optim.Optimizer) and not hasattr(value, "_optimizer_step_pre_hooks"):
        raise UsageError(
            f"ctx.track({name}=...): {type(value).__name__} is a torch.optim.Optimizer that has not called "
            "Optimizer.__init__, so its steps cannot be seen: call super().__init__(params, defaults), or "
            "derive it from nothing"
        )
    if not _has_state(value):
        raise TypeError(f"ctx.track({name}=...): found {_what(value)}; {_instead(name, value)}")


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _what(value: Any) -> str:
    if value is None:
        return "None"
    if inspect.isroutine(value):
        return "a function"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _instead(name: str, value: Any) -> str:
    """What to write for a value without a state_dict."""
    if isinstance(value, torch.Tensor):
        return (
            f'keep a tensor in its module, module.register_buffer("{name}", tensor), or as a plain value: '
            f"state = ctx.values({name}=...)"
        )
    if isinstance(value, (Sampler, BatchSampler, Dataset)):
        return "leave it out: ctx.batches(loader), of a DataLoader made with it, continues where it was"
    if isinstance(value, torch.Generator):
        return "ctx.batches(loader) keeps that of a DataLoader or a sampler; torch's default one is in each checkpoint"
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        return "what `random` and `numpy.random` draw by themselves is in each checkpoint: draw from those"
    if isinstance(value, numbers.Number) and not isinstance(value, _PLAIN):
        return f"for plain values write `state = ctx.values({name}={value})`, and use state.{name}"
    if inspect.isroutine(value):
        return "a function has no state; track the objects that it uses"
    if has := _objects_in(name, value):
        return f"track each by a name of its own: ctx.track({has})"
    if isinstance(value, (*_PLAIN, Mapping, list, tuple, Set)):
        return f"for plain values write `state = ctx.values({name}={_shown(value)})`, and use state.{name}"
    return (
        "it has no state_dict and load_state_dict: add both to its class, or keep what is plain in it by "
        "ctx.values(...)"
    )


def _objects_in(name: str, value: Any) -> str:
    """The arguments of a ctx.track for a dict, list or tuple of objects that can be tracked; empty for any other."""
    if isinstance(value, Mapping):
        each = {str(key): (f"{name}[{key!r}]", one) for key, one in value.items()}
    elif isinstance(value, (list, tuple)):
        each = {f"{name}_{index}": (f"{name}[{index}]", one) for index, one in enumerate(value)}
    else:
        return ""
    if not each or not all(isinstance(one, nn.Module) or _has_state(one) for _, one in each.values()):
        return ""
    fit = all(key.isidentifier() for key in each)
    words = [f"{key if fit else f'{name}_{number}'}={where}" for number, (key, (where, _)) in enumerate(each.items())]
    return ", ".join([*words[:2], "..."] if len(words) > 2 else words)


def _shown(value: Any) -> str:
    """A short value as it was given, else its place."""
    text = repr(value)
    return text if len(text) <= 20 else "..."
