"""Generators of a loader's own parts, and what a sampler counts and shuffles: none is in any state_dict."""

from __future__ import annotations

import functools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from jobkit.train import own_data

_DEEPEST = 20
"""So far parts are followed: concatenated datasets, their transforms, the lists in these."""

_LONGEST = 100
"""Entries up to which a list or dict is looked through: longer ones are data."""

_MOST = 10_000
"""Parts that are looked at: a dataset of more keeps its generators near the top."""

_PLAIN = (bool, int, float, str, type(None))

_NOT_LOOKED_INTO = (
    torch.Tensor,
    np.ndarray,
    torch.nn.Module,
    torch.optim.Optimizer,
    logging.Logger,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
)

_NOT_PARTS = ("_iterator", "_get_iterator")
"""Attributes of a DataLoader that are of one pass."""

_KINDS: dict[str, tuple[type[Any], Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "torch": (
        torch.Generator,
        torch.Generator,
        lambda one: one.get_state(),
        lambda one, state: one.set_state(state),
    ),
    "python": (
        random.Random,
        random.Random,
        lambda one: one.getstate(),
        lambda one, state: one.setstate(state),
    ),
    "random_state": (
        np.random.RandomState,
        np.random.RandomState,
        lambda one: one.get_state(),
        lambda one, state: one.set_state(state),
    ),
    "numpy": (
        np.random.Generator,
        np.random.default_rng,
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
}
"""By the name that is saved: (type, make one, its state, set it)."""

_SAMPLERS_PLAIN = "plain"

_DATA = "data"

_MOST_OF_WORKER = 1 << 20
"""Bytes of a list that a worker tells of with each batch."""

_SMALL = 1000
"""Entries of a list that a worker looks at after each batch; at others where a pass begins, and seldom."""

State = dict[str, Any]
"""(kind, state) by the path from the loader, as `sampler.generator`."""


def own_state(loader: Any) -> State:
    """The states of the generators that a loader's parts hold, and the plain attributes of its samplers."""
    return {path: found for path, _, _, found in _found(_parts(loader))}


def set_own_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Set what `own_state` found, where it is still there; a generator that its first use makes is made."""
    owners: dict[str, Any] = {}
    found = {path: (owner, name, value) for path, owner, name, value in _parts(loader, owners)}
    for path, (kind, saved) in state.items():
        owner, name, value = found.get(path, (owners.get(path.rpartition(".")[0]), path.rpartition(".")[2], None))
        if kind == _SAMPLERS_PLAIN:
            if path in found and isinstance(value, _PLAIN) and value != saved and not _is_place(saved):
                setattr(owner, name, saved)
        elif kind == _DATA:
            if path in found and own_data.may_be_data(owner, value):
                own_data.put(owner, name, value, saved)
        elif generator_kind(value) == kind:
            _KINDS[kind][3](value, saved)
        elif value is None and owner is not None:
            _put(owner, name, _made(kind, saved))


def _is_place(value: Any) -> bool:
    """Whether it is a folder or an address, as on the node's own disk: that of this attempt is the one to use."""
    return isinstance(value, str) and "/" in value


def _put(owner: Any, name: str, generator: Any) -> None:
    """Give an object a generator that it does not have yet."""
    if isinstance(owner, dict):
        owner[int(name) if name.isdigit() and name not in owner else name] = generator  # as by the number of a worker
    elif isinstance(owner, list):
        owner[int(name)] = generator
    elif hasattr(owner, "__dict__") and not isinstance(owner, (types.FunctionType, types.MethodType)):
        setattr(owner, name, generator)


class OwnState:
    """`own_state` of a root that is asked for after each batch: large ones are not looked through each time."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._asked = 0
        self._known: list[tuple[str, Any, str]] | None = None
        self._data: dict[tuple[int, str], own_data.Data | None] = {}

    def now(self) -> State:
        """The state."""
        self._asked += 1
        if self._asked & (self._asked - 1) == 0:
            self._data = {}
        if self._known is None or self._asked & (self._asked - 1) == 0:  # some generators are made when they are used
            parts = list(_parts(self._root))
            found = list(_found(parts, self._data_of))
            self._known = [(path, owner, name) for path, owner, name, _ in found] if len(parts) > _FEW else None
            return {path: state for path, _, _, state in found}
        known = self._known
        values = ((path, owner, name, dict(_inside(owner)).get(name)) for path, owner, name in known)
        return {path: state for path, _, _, state in _found(values, self._data_of)}

    def _data_of(self, owner: Any, name: str, value: Any) -> own_data.Data | None:
        key = id(owner), name
        if key in self._data or not own_data.is_order(owner):
            return self._data.get(key)
        found = own_data.found(owner, name, value)
        if found is not None and found[2] is not None and len(found[2]) > _MOST_OF_WORKER:
            own_data.tell_too_large(owner, name, _MOST_OF_WORKER)
            found = None
        if len(value) > _SMALL:
            self._data[key] = found
        return found


_FEW = 100
"""Parts that are looked through in less time than a sample takes."""


def _found(
    parts: Iterable[tuple[str, Any, str, Any]], data_of: Callable[[Any, str, Any], Any] = own_data.found
) -> Iterator[tuple[str, Any, str, tuple[str, Any]]]:
    for path, owner, name, value in parts:
        kind = generator_kind(value)
        if kind is not None:
            yield path, owner, name, (kind, _KINDS[kind][2](value))
        elif isinstance(value, _PLAIN):
            if _is_sampler(owner) and name not in ("rank", "num_replicas"):
                yield path, owner, name, (_SAMPLERS_PLAIN, value)
        elif own_data.may_be_data(owner, value) and (data := data_of(owner, name, value)) is not None:
            yield path, owner, name, (_DATA, data)


def generator_kind(value: Any) -> str | None:
    """Which of Python's, NumPy's and torch's generators a value is; None for what is none."""
    if issubclass(type(value), random.SystemRandom):  # isinstance would ask a proxy for what it stands for
        return None
    return next((name for name, kind in _KINDS.items() if issubclass(type(value), kind[0])), None)


def generator_state(generator: Any) -> Any:
    """What it would draw next."""
    return _KINDS[str(generator_kind(generator))][2](generator)


def set_generator_state(generator: Any, state: Any) -> None:
    """Let it draw that."""
    _KINDS[str(generator_kind(generator))][3](generator, state)


def is_plain(found: tuple[str, Any]) -> bool:
    """Whether an entry of `own_state` is a plain attribute or a list, and no generator."""
    return found[0] in (_SAMPLERS_PLAIN, _DATA)


def _made(kind: str, state: Any) -> Any:
    if kind == "numpy":
        made: Any = np.random.Generator(getattr(np.random, state["bit_generator"])())
    else:
        made = _KINDS[kind][1]()
    _KINDS[kind][3](made, state)
    return made


def _is_sampler(value: Any) -> bool:
    return own_data.is_order(value) or "sampler" in type(value).__name__.lower()


def _parts(root: Any, owners: dict[str, Any] | None = None) -> Iterator[tuple[str, Any, str, Any]]:
    """(path, owner, name, value) of what a value holds: generators, plain values, and within other objects.

    The nearest come first. `owners` is given those objects, by their path.
    """
    seen: set[int] = {id(root)}
    waiting: deque[tuple[str, Any, int]] = deque([("", root, 0)])
    while waiting and len(seen) < _MOST:
        prefix, owner, depth = waiting.popleft()
        if owners is not None:
            owners[prefix[:-1]] = owner
        for name, value in _inside(owner):
            if type(value) in weakref.ProxyTypes:
                continue
            path = f"{prefix}{name}"
            if generator_kind(value) is not None or isinstance(value, _PLAIN):
                if isinstance(value, _PLAIN) or id(value) not in seen:
                    seen.add(id(value))
                    yield path, owner, name, value
                continue
            if id(value) in seen:
                continue
            if own_data.may_be_data(owner, value):
                seen.add(id(value))
                yield path, owner, name, value
            if depth < _DEEPEST and _is_looked_into(value):
                seen.add(id(value))
                waiting.append((f"{path}.", value, depth + 1))


def _inside(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(owner)] if len(owner) <= _LONGEST else []
    if isinstance(owner, dict):
        return [(str(key), value) for key, value in owner.items()] if len(owner) <= _LONGEST else []
    if isinstance(owner, types.MethodType):
        return [("__self__", owner.__self__)]
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        return [*held, ("__defaults__", owner.__defaults__), ("__kwdefaults__", owner.__kwdefaults__)]
    if isinstance(owner, functools.partial):
        return [("func", owner.func), ("args", owner.args), ("keywords", owner.keywords)]
    if not type(owner).__dictoffset__:
        return []
    return [(name, _scripts_own(value)) for name, value in vars(owner).items() if name not in _NOT_PARTS]


def _scripts_own(value: Any) -> Any:
    """In the place of what jobkit has put there."""
    return getattr(value, type(value).stands_for) if hasattr(type(value), "stands_for") else value


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict, types.MethodType)):
        return True
    is_jobkits = type(value).__module__.startswith("jobkit.")  # as the context, in a function's closure
    has_attributes = type(value).__dictoffset__  # not by hasattr, which a __getattr__ of the user's own may answer
    return bool(has_attributes) and not is_jobkits and not isinstance(value, _NOT_LOOKED_INTO)
