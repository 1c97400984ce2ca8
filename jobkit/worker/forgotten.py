"""What a script changes in its loop and no checkpoint has: said once, for another attempt would have it anew."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from jobkit.checkpoint.state import is_raw
from jobkit.checkpoint.summary import digest, summarise
from jobkit.log import log
from jobkit.train.parallel import unwrapped
from jobkit.train.tracked_generator import TrackedGenerator, is_generator
from jobkit.worker.caller import CallerLoop, is_of_library
from jobkit.worker.values import Values

_SHOWN = 6
"""Names in a message, at most."""

_IMMUTABLE = (bool, int, float, str, tuple, type(None))

_MOST = 2000
"""Values that are looked at in a variable, as in a list of numbers."""

_DEEPEST = 3
"""So far objects and containers are looked into."""

_CLOCK_SECONDS = 3600.0
"""A number so near to a clock is a time, which another attempt takes again by itself."""

_LIKE_A_SUM = 100_000.0
"""Seconds since a machine has started, below which they are like any number of a script's."""


def is_used_after(loop: CallerLoop, frame: FrameType, tracked: Collection[Any]) -> bool:
    """Whether the lines after a loop read what the loop sets or changes, but for tracked objects.

    An attempt that does not run the loop again, since its batches are done, does not have that.
    """
    stored, used = loop.used_after()
    known = {id(value) for value in tracked}
    others = [frame.f_locals[name] for name in used if name in frame.f_locals]
    changed = [one for one in others if isinstance(one, (list, dict, set)) or _is_own_object(one)]
    return bool(stored) or any(id(one) not in known for one in changed)


class ForgottenValues:
    """Compares the variables of a loop's frame with what they were. `tracked` is asked for the tracked objects."""

    def __init__(self, frame: FrameType, tracked: Callable[[], Collection[Any]]) -> None:
        self._frame, self._tracked = frame, tracked
        self._loop = CallerLoop(frame)
        self._before = self._seen()
        self._frame_had = set(frame.f_locals)

    def tell(self, told: set[str], what_is_lost: str) -> None:
        """Say which variables the loop has changed and carries on, but for those in `told`, to which they are added."""
        now = self._seen()
        changed = [name for name, value in self._before.items() if now.get(name, value) != value and name not in told]
        changed = [name for name in changed if name not in self._frame.f_locals or self._loop.carries(name)]
        told.update(changed)
        kinds = {name: self._before[name][0] for name in changed}
        stateful = [name for name in changed if kinds[name] == "state"]
        objects = [name for name in changed if kinds[name] == "object"]
        plain = [name for name in changed if kinds[name] == "plain"]
        where = self._loop.where
        some = sorted(name for name in self._loop.set_in_some_rounds() - told if name not in self._frame_had)
        if some:
            told.update(some)
            log.warning(
                "%s: %s set in some rounds of the loop and used in others: an attempt that goes on between them does "
                "not have %s, and fails there. Set it before the loop, and keep it in ctx.values or a tracked object",
                where,
                _listed(some, "is", "are"),
                "it" if len(some) == 1 else "them",
            )
        if objects:
            log.warning(
                "%s: %s changed in the loop, and no checkpoint has %s: %s. Give the class state_dict() and "
                "load_state_dict(state), and the object to the loop: ctx.epochs(n, ..., %s=%s), or ctx.track("
                "per_rank={%r: %s}) where each rank has values of its own",
                where,
                _listed(objects, "is", "are"),
                "it" if len(objects) == 1 else "them",
                what_is_lost,
                objects[0],
                objects[0],
                objects[0],
                objects[0],
            )
        if plain:
            log.warning(
                "%s: %s changed in the loop, and no checkpoint has %s: %s. Plain values belong into "
                "`state = ctx.values(%s=...)` before the loop, and are used as state.%s (ctx.step counts the steps)",
                where,
                _listed(plain, "is", "are"),
                "it" if len(plain) == 1 else "them",
                what_is_lost,
                plain[0],
                plain[0],
            )
        if stateful:
            log.warning(
                "%s: %s changed in the loop and not tracked: %s. Give it to the loop: ctx.epochs(n, ..., %s=%s)",
                where,
                _listed(stateful, "is", "are"),
                what_is_lost,
                stateful[0],
                stateful[0],
            )

    def _seen(self) -> dict[str, tuple[Any, ...]]:
        tracked = self._tracked()
        found = {}
        of_module = self._frame.f_globals if self._frame.f_globals is not self._frame.f_locals else {}
        for name, value in [*of_module.items(), *self._frame.f_locals.items()]:
            if not name.startswith("__") and (seen := _seen(value, _Looks(tracked))) is not None:
                found[name] = seen
        return found


class _Looks:
    """How many values may still be looked at in a variable, and what is tracked and needs none."""

    def __init__(self, tracked: Collection[Any]) -> None:
        self.left = _MOST
        modules = [unwrapped(value) for value in tracked if isinstance(value, nn.Module)]
        generators = [value.generator for value in tracked if isinstance(value, TrackedGenerator)]
        values = [one for value in tracked if isinstance(value, Values) for one in vars(value).values()]
        self._known = {id(one) for one in (*tracked, *modules, *generators, *values) if not isinstance(one, _IMMUTABLE)}
        self._parameters = {id(one) for module in modules for one in module.parameters()}

    def has_kept(self, value: Any) -> bool:
        """Whether a checkpoint has it: a tracked object, or a module around or in one."""
        if id(value) in self._known:
            return True
        return isinstance(value, nn.Module) and any(id(one) in self._parameters for one in value.parameters())


def _seen(value: Any, looks: _Looks, depth: int = 0) -> tuple[Any, ...] | None:
    """What tells whether a value has changed; None for what is of no interest."""
    looks.left -= 1
    if looks.has_kept(value):
        return None
    if isinstance(value, (bool, str)) or value is None:
        return "plain", value
    if isinstance(value, (int, float)):
        return None if _is_time(value) else ("plain", value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "object" if depth else "plain", id(value), *_some_of(value)
    if is_generator(value):
        return "state", digest(summarise(TrackedGenerator(value).state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return None  # worker/untracked.py refuses those
    if isinstance(value, nn.Module):
        return "state", tuple((id(one), *_some_of(one)) for one in (*value.parameters(), *value.buffers()))
    if isinstance(value, (list, tuple, dict, set)):
        entries = _entries(value, looks, depth)
        is_plain = all(one is None or one[0] == "plain" for _, one in entries)
        return "plain" if is_plain else "object", len(value), *entries
    if _has_state(value):
        try:
            return "state", digest(summarise(value.state_dict()))
        except Exception:  # a state_dict of somebody else's, asked for to say something
            return None
    if _is_own_object(value):
        return "object", *_entries(vars(value), looks, depth)
    return None


def _entries(value: Any, looks: _Looks, depth: int) -> list[Any]:
    if depth == _DEEPEST or isinstance(value, set):
        return []
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, one in entries:
        if looks.left <= 0:
            break
        found.append((key, _seen(one, looks, depth + 1)))
    return found


def _some_of(value: Any) -> tuple[Any, ...]:
    """How often torch has counted a change, and some elements: a change through `.data` is not counted."""
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
    if isinstance(value, torch.Tensor) and (is_lazy(value) or value.is_meta or not is_raw(value)):
        return (version,)
    if isinstance(value, DTensor):
        value = value.to_local()
    flat = value.detach().reshape(-1) if isinstance(value, torch.Tensor) else value.reshape(-1)
    return version, *(repr(flat[place]) for place in range(0, len(flat), max(1, len(flat) // 4)))


def _is_time(value: float) -> bool:
    clocks = [time.time(), time.time_ns()]
    if time.perf_counter() > _LIKE_A_SUM:
        clocks.append(time.perf_counter())
    return any(abs(value - clock) < _CLOCK_SECONDS for clock in clocks)


def _has_state(value: Any) -> bool:
    is_loader = isinstance(value, (torch.utils.data.DataLoader, type, types.ModuleType))
    return not is_loader and hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _is_own_object(value: Any) -> bool:
    """An instance of a class of the script's own, as a running mean: not of a library's, as a progress bar."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType)) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module == "__main__" or bool(file and not is_of_library(module, file))


def _listed(names: list[str], one: str, several: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{shown} {one if len(names) == 1 else several}"
