"""What objects that a framework does not save keep as attributes: counters, running means, averages of the weights."""

from __future__ import annotations

import copy
import dis
import inspect
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.serialization import default_restore_location
from torch.utils.data import DataLoader, Sampler

from jobkit.checkpoint.summary import digest, summarise
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.train.own_state import generator_kind, generator_state, set_generator_state

FRAMEWORKS = (
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"),
    *("jobkit", "numpy"),
)
"""Packages whose objects save what they need, or are asked for it in another way."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_DEEPEST = 3
"""So far objects of the script's own classes are followed from an owner."""

_NOT_STATE = ("training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices")

_PLAIN, _GENERATOR, _STATE, _SAME = "plain", "generator", "state", "same"

Entry = tuple[str, Any]
"""(kind, value): a plain value, (kind, state) of a generator, a state_dict, or the rank whose state_dict it is, too."""

Saved = dict[str, dict[str, Entry]]
"""By owner and attribute."""


class KeptAttributes:
    """Attributes that the training changes: plain values, generators, and objects with a state_dict.

    `owners` are the objects, by a name that is the same in each attempt; objects of the script's own classes that they
    hold are owners too. `saved` is what the framework saves: such objects, and what shares tensors with them, are left
    out, and so are the names in `apart`, by owner. Only what has changed since this was made is kept, so that what the
    code sets stays as the code says. All ranks make it; where they have `one_disk`, equal states are written once.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        saved: Iterable[Any] = (),
        *,
        apart: Mapping[str, Collection[str]] | None = None,
        one_disk: bool = True,
    ) -> None:
        self._apart = dict(apart or {})
        self._ranks = RankGroup.of_world() if one_disk else None
        self._is_main = not dist.is_initialized() or dist.get_rank() == 0
        self._saved = {id(one): one for one in saved if one is not None}
        self._storages = {storage for one in self._saved.values() for storage in _storages(_tensors(one))}
        self._owners = dict(self._with_held(owners))
        self._before = {key: self._marks(key) for key in self._owners}
        self._told: set[tuple[str, str]] = set()

    def changed(self, plain: Saved | None = None) -> Saved:
        """What has changed, for another attempt; all ranks call it. Values are not copied.

        `plain` is what `snapshot` found earlier, for all but state_dicts.
        """
        found = self.snapshot(copied=False) if plain is None else {key: dict(names) for key, names in plain.items()}
        states: dict[tuple[str, str], tuple[str, Any]] = {}
        for key in self._owners:
            for name, value in self._attributes(key):
                if _is_plain(value) or generator_kind(value) is not None:
                    continue
                state = value.state_dict()
                now, before = _state_mark(value, state), self._before[key].get(name)
                if before is None:
                    self._tell(key, name, "it is made after the training has begun: make it in __init__")
                elif before != (_STATE, now):
                    states[key, name] = now[-1], state
        first = self._first_with({place: mark for place, (mark, _) in states.items()})
        for (key, name), (_, state) in states.items():
            same = first.get((key, name))
            found.setdefault(key, {})[name] = (_STATE, state) if same is None else (_SAME, same)
        return found

    def snapshot(self, *, copied: bool = True) -> Saved:
        """What has changed now, without state_dicts."""
        found: Saved = {}
        for key in self._owners:
            for name, value in self._attributes(key):
                kind = generator_kind(value)
                if kind is None and not _is_plain(value):
                    continue
                mark, before = _mark(value), self._before[key].get(name)
                if before is not None and before[0] in (_PLAIN, _GENERATOR) and _same(before[1], mark):
                    continue
                if kind is not None:
                    found.setdefault(key, {})[name] = _GENERATOR, (kind, generator_state(value))
                else:
                    value = _detached(value)
                    found.setdefault(key, {})[name] = _PLAIN, copy.deepcopy(value) if copied else value
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Entry]], of_rank: Callable[[int], Saved] | None = None) -> None:
        """Set what `changed` found; `of_rank` is what another rank's found, of the same checkpoint."""
        others: dict[int, Saved] = {}
        for key, names in saved.items():
            owner = self._owners.get(key)
            if owner is None:
                continue
            for name, entry in names.items():
                if entry[0] == _SAME:
                    assert of_rank is not None
                    rank = entry[1]
                    others[rank] = others.get(rank) or of_rank(rank)
                    entry = others[rank][key][name]
                self._set(key, owner, name, *entry)

    def _set(self, key: str, owner: Any, name: str, kind: str, value: Any) -> None:
        now = vars(owner).get(name)
        if kind == _PLAIN:
            if isinstance(now, Tensor) and now.requires_grad and now.is_leaf and now.shape == value.shape:
                with torch.no_grad():
                    now.copy_(value)  # an optimizer may have it
                return
            vars(owner)[name] = copy.deepcopy(value)
        elif kind == _GENERATOR:
            if generator_kind(now) == value[0]:
                set_generator_state(now, value[1])
        elif self._is_stateful(now):
            now.load_state_dict(value)
        else:
            self._tell(key, name, "there is nothing to load it into as the training begins: make it in __init__")

    def _marks(self, key: str) -> dict[str, tuple[str, Any]]:
        found = {}
        for name, value in self._attributes(key):
            if generator_kind(value) is not None:
                found[name] = _GENERATOR, _mark(value)
            elif _is_plain(value):
                found[name] = _PLAIN, _mark(value)
            else:
                found[name] = _STATE, _state_mark(value, value.state_dict())
        return found

    def _attributes(self, key: str) -> Iterator[tuple[str, Any]]:
        """An owner's that can be kept."""
        for name, value in self._named(key, self._owners[key]):
            is_plain = _is_plain(value) and not self._storages & set(_storages(_tensors_within(value)))
            if is_plain or generator_kind(value) is not None or self._is_stateful(value):
                yield name, value

    def _named(self, key: str, owner: Any) -> list[tuple[str, Any]]:
        """Those that are public, and others that the code of the owner's own class sets."""
        cls: Any = type(owner)
        own, apart = assigned_names(cls), {*_NOT_STATE, *self._apart.get(key, ())}
        named = vars(owner).items() if hasattr(owner, "__dict__") else ()
        return [(name, one) for name, one in named if name not in apart and (name in own or not name.startswith("_"))]

    def _with_held(self, owners: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The owners, and the objects of the script's own classes that they hold."""
        seen = set(self._saved) - {id(one) for one in owners.values()}
        waiting = deque((key, one, 0) for key, one in owners.items())
        while waiting:
            key, owner, depth = waiting.popleft()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            yield key, owner
            for name, value in self._named(key, owner) if depth < _DEEPEST else ():
                if _is_looked_into(value):
                    waiting.append((f"{key}.{name}", value, depth + 1))

    def _is_stateful(self, value: Any) -> bool:
        """Whether it has a state_dict of its own, which no other has."""
        if isinstance(value, (type, nn.Parameter)) or id(value) in self._saved:
            return False
        if not all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        if _home(type(value)) == "torchdata" or id(getattr(value, "optimizer", None)) in self._saved:
            return False
        tensors = list(_tensors(value))
        if any(isinstance(one, DTensor) for one in tensors):
            return False
        return not self._storages & set(_storages(tensors))

    def _first_with(self, marks: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], int]:
        """The rank before this one that has the same: only that one writes it."""
        if self._ranks is None:
            return {}
        everyone = self._ranks.gather(dict(marks))
        found = {}
        for place, mark in marks.items():
            first = next(rank for rank, one in enumerate(everyone) if one.get(place) == mark)
            if first < self._ranks.rank:
                found[place] = first
        return found

    def _tell(self, key: str, name: str, why: str) -> None:
        if (key, name) not in self._told and self._is_main:
            log.warning("%s.%s begins anew in each attempt: %s", key, name, why)
        self._told.add((key, name))


@cache
def assigned_names(cls: Hashable) -> frozenset[str]:
    """Attributes that the code of a class sets, and that of its bases; those of frameworks are left out."""
    assert isinstance(cls, type)
    return names_set_by(one for one in cls.__mro__ if _home(one) not in (*FRAMEWORKS, "builtins"))


def names_set_by(classes: Iterable[type]) -> frozenset[str]:
    """Attributes that the methods of some classes set, of whatever object."""
    found: set[str] = set()
    for cls in classes:
        for member in vars(cls).values():
            parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for part in parts:
                function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
                if isinstance(function, FunctionType):
                    found |= _names_set(function.__code__)
    return frozenset(found)


def _names_set(code: CodeType) -> set[str]:
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names_set(inner)
    return found


def on_device(device: torch.device) -> Callable[[Any, str], Any]:
    """For torch.load's map_location: what was on an accelerator comes to this rank's, which may be another now."""
    restore: Any = default_restore_location
    return lambda storage, place: storage if place == "cpu" else restore(storage, str(device))


def is_of_framework(value: Any) -> bool:
    """Whether its class is one of a framework's."""
    return _home(type(value)) in FRAMEWORKS


def _home(cls: type) -> str:
    return (cls.__module__ or "").partition(".")[0]


@cache
def _is_of_script(cls: Hashable) -> bool:
    """Whether a class is of the script's own code, and no library's."""
    assert isinstance(cls, type)
    if cls.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and _home(cls) not in FRAMEWORKS and not file.startswith(_INSTALLED)


def _is_looked_into(value: Any) -> bool:
    """Whether it is an object of the script's own that no state_dict stands for."""
    if isinstance(value, (type, FunctionType, nn.Module, Sampler, DataLoader)) or not hasattr(value, "__dict__"):
        return False
    cls: Any = type(value)
    return _is_of_script(cls) and not hasattr(cls, "load_state_dict")


# Plain values


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, (nn.Parameter, DTensor))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray, np.generic))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _mark(value: Any) -> Any:
    """A value by which it is seen later whether it has changed; of a tensor no copy."""
    if generator_kind(value) is not None:
        return digest(summarise(generator_state(value), whole_up_to=1 << 16))
    tensors = list(_tensors_within(value))  # torch does not count changes through `.data`
    return [_structure(value), digest(summarise(tensors)) if tensors else ""]


def _tensors_within(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_within(one)


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (_TENSOR, value, value._version)
    if isinstance(value, np.ndarray):
        return (_TENSOR, value.tobytes(), value.shape)
    if isinstance(value, dict):
        return {key: _structure(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_structure(one) for one in value]
    return copy.copy(value)


_TENSOR = object()


def _same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple) and before[:1] == (_TENSOR,):
        same = before[1] is now[1] or (isinstance(before[1], bytes) and before[1] == now[1])
        return bool(same and before[2] == now[2])
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(before[key], now[key]) for key in before)
    if isinstance(before, list):
        return len(before) == len(now) and all(map(_same, before, now))
    return bool(before == now or before != before)


# Objects with a state_dict


def _state_mark(value: Any, state: Any) -> tuple[Any, ...]:
    """By which it is seen whether a state has changed; the last is the same on all ranks for the same state.

    Changes through `.data` are not counted by torch, and of large tensors some elements are looked at.
    """
    return (*((id(one), one._version) for one in _tensors(value)), digest(summarise(state)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that an object consists of."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
    elif hasattr(value, "__dict__"):
        for one in vars(value).values():
            yield from _tensors_within(one) if isinstance(one, (Tensor, list, tuple, dict)) else ()


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    for one in tensors:
        if one.layout == torch.strided and not isinstance(one, DTensor) and one.numel():
            yield one.untyped_storage().data_ptr()
