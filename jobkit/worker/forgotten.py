"""What a script changes in its loop and no checkpoint has: said once, for another attempt would have it anew."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
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
from jobkit.train.fields import fields_of
from jobkit.train.parallel import unwrapped
from jobkit.train.tracked_generator import TrackedGenerator, is_generator
from jobkit.worker.caller import CallerLoop, frame_of_script, is_of_library, local_variables
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

_ADVICE = {
    "object": "Give the class state_dict() and load_state_dict(state), and the object to the loop: "
    "ctx.epochs(n, ..., {key}={name}), or ctx.track(per_rank={{'{key}': {name}}}) where each rank has values of its "
    "own",
    "several": "Keep what it holds in an object of a class with state_dict() and load_state_dict(state), and give that "
    "to the loop: ctx.epochs(n, ..., {key}={name})",
    "plain": "Plain values belong into `state = ctx.values({key}=...)` before the loop, all in one call, and are used "
    "as state.{key} (ctx.step counts the steps)",
    "state": "Give it to the loop: ctx.epochs(n, ..., {key}={name})",
}
"""What to write for a variable, by what is seen of its value: attributes, a container of such objects, a plain value,
or a state_dict."""

_LIKE_A_SUM = 100_000.0
"""Seconds since a machine has started, below which they are like any number of a script's."""


def frames_around(frame: FrameType) -> list[FrameType]:
    """The frame in which a loop stands, and where that is a generator's, those of the loops over it."""
    found = [frame]
    while frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame_of_script(frame.f_back)
        found.append(frame)
    return found


def is_used_after(loop: CallerLoop, frame: FrameType, tracked: Collection[Any]) -> bool:
    """Whether the lines after a loop read what the loop sets or changes, but for tracked objects.

    An attempt that does not run the loop again, since its batches are done, does not have that.
    """
    stored, used = loop.used_after()
    known = {id(value) for value in tracked}
    local = local_variables(frame)
    others = [local[name] for name in used if name in local]
    changed = [one for one in others if isinstance(one, (list, dict, set)) or _is_own_object(one)]
    return bool(stored) or any(id(one) not in known for one in changed)


class ForgottenValues:
    """Compares the variables of a loop's frame with what they were. `tracked` is asked for the tracked objects."""

    def __init__(self, frame: FrameType, tracked: Callable[[], Collection[Any]]) -> None:
        self._frame, self._tracked = frame, tracked
        self._loop = CallerLoop(frame)
        self._before = self._seen()
        self._frame_had = set(local_variables(frame))

    def tell(self, told: set[str], what_is_lost: str) -> None:
        """Say which variables the loop has changed and carries on, but for those in `told`, to which they are added."""
        now = self._seen()
        changed = [name for name, value in self._before.items() if now.get(name, value) != value and name not in told]
        local = local_variables(self._frame)
        changed = [name for name in changed if name not in local or self._loop.carries(name)]
        told.update(changed)
        some = sorted(name for name in self._loop.set_in_some_rounds() - told if name not in self._frame_had)
        told.update(some)
        if some:
            log.warning(
                "%s: %s set in some rounds of the loop and used in others: an attempt that goes on between them does "
                "not have %s, and fails there. Set it before the loop, and keep it in ctx.values or a tracked object",
                self._loop.where,
                _listed(some, "is", "are"),
                _pronoun(some),
            )
        self._tell_iterators(told)
        for kind, advice in _ADVICE.items():
            if names := [name for name in changed if self._before[name][0] == kind]:
                lost = " and not tracked" if kind == "state" else f", and no checkpoint has {_pronoun(names)}"
                log.warning(
                    "%s: %s changed in the loop%s: %s. %s",
                    self._loop.where,
                    _listed([self._told_as(name, now) for name in names], "is", "are"),
                    lost,
                    what_is_lost,
                    advice.format(name=names[0], key=self._key(names[0])),
                )

    def _tell_iterators(self, told: set[str]) -> None:
        variables = {**self._frame.f_globals, **local_variables(self._frame)}
        read = sorted(name for name in self._loop.read_by_next() - told if _is_own_iterator(variables.get(name)))
        told.update(read)
        if read:
            log.warning(
                "%s: %s read on in the loop by next(), and no checkpoint has how far: another attempt reads from the "
                "beginning. ctx.batches(one, other) reads two loaders at once, up to the end of the shorter one; else "
                "read by an object with state_dict() and load_state_dict(state), and give that to the loop",
                self._loop.where,
                _listed(read, "is", "are"),
            )

    def _told_as(self, name: str, now: Mapping[str, tuple[Any, ...]]) -> str:
        """A variable, and of an object the attributes that have changed."""
        before, after = self._before[name], now.get(name, ())
        if before[0] != "object" or len(before) != len(after):
            return name
        pairs = zip(before[1:-1], after[1:-1], strict=True)
        changed = [str(one[0]) for one, other in pairs if one != other and isinstance(one, tuple)]
        return f"{name} ({', '.join(changed[:_SHOWN])})" if changed else name

    def _key(self, name: str) -> str:
        """The name under which a variable is given to the loop: `self` is no keyword there."""
        if name == "self":
            return type(local_variables(self._frame)["self"]).__name__.lower()
        return name.rpartition(".")[2]

    def _seen(self) -> dict[str, tuple[Any, ...]]:
        kept, found = _Kept(self._tracked()), {}
        for name, value in self._variables():
            looks = _Looks(kept)
            try:
                seen = _seen(value, looks)
            except Exception:  # another thread changes it, or it stands for what is not there any more
                continue
            if seen is not None:
                found[name] = *seen, looks.of_tensors()
        return found

    def _variables(self) -> Iterator[tuple[str, Any]]:
        """The variables that the frame sees, and those in the script's own modules, classes and functions."""
        for name, value in {**self._frame.f_globals, **local_variables(self._frame)}.items():
            if name.startswith("__") or type(value) in weakref.ProxyTypes:
                continue
            yield name, value
            if isinstance(value, torch.utils.data.DataLoader):
                yield from ((f"{name}.dataset.{own}", held) for own, held in _settings_of(value.dataset))
            if _is_own_holder(value):
                for own, held in list(vars(value).items()):
                    if not own.startswith("__") and not isinstance(held, (*_HOLDERS, *_DESCRIPTORS)):
                        yield f"{name}.{own}", held


class _Kept:
    """What tracked objects keep in a checkpoint."""

    def __init__(self, tracked: Collection[Any]) -> None:
        modules = [unwrapped(value) for value in tracked if isinstance(value, nn.Module)]
        generators = [value.generator for value in tracked if isinstance(value, TrackedGenerator)]
        values = [one for value in tracked if isinstance(value, Values) for one in vars(value).values()]
        self._parameters = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
        self._known = {id(one) for one in (*tracked, *modules, *generators, *values) if not isinstance(one, _IMMUTABLE)}
        self._known |= self._parameters

    def __contains__(self, value: Any) -> bool:
        """Whether a checkpoint has it: a tracked object, or a module around or in one."""
        if id(value) in self._known:
            return True
        return isinstance(value, nn.Module) and any(id(one) in self._parameters for one in value.parameters())


class _Looks:
    """How many values may still be looked at in a variable, and the tensors that were found in it."""

    def __init__(self, kept: _Kept) -> None:
        self.left, self.kept = _MOST, kept
        self._tensors: list[torch.Tensor] = []

    def at(self, tensor: torch.Tensor) -> int:
        """How often torch has counted a change; a change through `.data` is not counted, so elements are for later."""
        if not (is_lazy(tensor) or tensor.is_meta or not is_raw(tensor)):
            self._tensors.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return 0 if tensor.is_inference() else tensor._version

    def of_tensors(self) -> str:
        """Some elements of all of them: one copy from a GPU, for which it is waited once."""
        return digest(summarise(self._tensors)) if self._tensors else ""


def _seen(value: Any, looks: _Looks, depth: int = 0) -> tuple[Any, ...] | None:
    """What tells whether a value has changed; None for what is of no interest."""
    looks.left -= 1
    if value in looks.kept:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return "plain", value.name
    if isinstance(value, (bool, str)) or value is None:
        return "plain", value
    if isinstance(value, (int, float)):
        return None if _is_time(value) else ("plain", value)
    if isinstance(value, torch.Tensor):
        return "object" if depth else "plain", id(value), looks.at(value)
    if isinstance(value, np.ndarray):
        places = range(0, value.size, max(1, value.size // 4))
        return "object" if depth else "plain", id(value), *(repr(value.flat[place]) for place in places)
    if is_generator(value):
        return "state", digest(summarise(TrackedGenerator(value).state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return None  # worker/untracked.py refuses those
    if isinstance(value, (torch.utils.data.Sampler, torch.utils.data.IterableDataset)):
        return None  # their loader keeps what they change
    if isinstance(value, nn.Module):
        return "state", *((id(one), looks.at(one)) for one in (*value.parameters(), *value.buffers()))
    if isinstance(value, (list, tuple, dict, set, deque)):
        entries = _entries(value, looks, depth)
        is_plain = all(one is None or one[0] == "plain" for _, one in entries)
        return "plain" if is_plain else "several", len(value), *entries
    if _has_state(value) and _holds_modules(value):
        return "state", *_entries(vars(value), looks, depth)  # a state_dict of them may need all ranks, and this is one
    if _has_state(value):
        try:
            return "state", digest(summarise(value.state_dict()))
        except Exception:  # a state_dict of somebody else's, asked for to say something
            return None
    if _is_own_object(value):
        return "object", *_entries(dict(fields_of(value)), looks, depth)
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


def _settings_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The numbers and texts of a dataset of the script's own: a level of noise, a length. A stream's are kept."""
    if _is_own_object(dataset) and not isinstance(dataset, torch.utils.data.IterableDataset):
        for name, held in {**vars(type(dataset)), **dict(fields_of(dataset))}.items():
            if isinstance(held, (bool, int, float, str, np.generic)) and not name.startswith("__"):
                yield name, held


def _is_own_iterator(value: Any) -> bool:
    """Whether it is an iterator over what the script reads besides; a library's generator is one around ctx.batches."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame  # None at its end
        return frame is not None and not is_of_library(frame.f_globals.get("__name__"), frame.f_code.co_filename)
    return isinstance(value, Iterator) and not _has_state(value)


_HOLDERS = (types.ModuleType, type, types.FunctionType)

_DESCRIPTORS = (property, staticmethod, classmethod)


def _is_own_holder(value: Any) -> bool:
    """A module, class or function of the script's own, or arguments: what they have is used like variables."""
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return True
    if isinstance(value, types.ModuleType):
        return not is_of_library(value.__name__, getattr(value, "__file__", None) or "<frozen")
    return isinstance(value, (type, types.FunctionType)) and _is_of_script(value.__module__)


def _is_of_script(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module == "__main__" or bool(file and not is_of_library(module, file))


def _is_time(value: float) -> bool:
    clocks = [time.time(), time.time_ns()]
    if time.perf_counter() > _LIKE_A_SUM:
        clocks.append(time.perf_counter())
    return any(abs(value - clock) < _CLOCK_SECONDS for clock in clocks)


def _has_state(value: Any) -> bool:
    is_loader = isinstance(value, (torch.utils.data.DataLoader, type, types.ModuleType))
    return not is_loader and hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _holds_modules(value: Any) -> bool:
    held = getattr(value, "__dict__", {}).values()
    several = [one for each in held if isinstance(each, (list, tuple)) for one in each]
    return any(isinstance(one, (nn.Module, torch.optim.Optimizer)) for one in (*held, *several[:_MOST]))


def _is_own_object(value: Any) -> bool:
    """An instance of a class of the script's own, as a running mean: not of a library's, as a progress bar."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, Enum)):
        return False
    return _is_of_script(type(value).__module__)


def _listed(names: list[str], one: str, several: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{shown} {one if len(names) == 1 else several}"


def _pronoun(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
