"""What objects that a framework does not save keep as attributes: counters, running means, averages of the weights."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Sampler

from jobkit.checkpoint.state import bytes_of, is_raw
from jobkit.checkpoint.summary import digest, summarise
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.train.fields import assigned_names, fields_of, home, is_of_script, put, set_in_place
from jobkit.train.own_state import generator_kind, generator_state, set_generator_state
from jobkit.train.plain import Plain, plain

_DEEPEST = 3
"""So far objects of the script's own classes are followed from an owner."""

_NOT_STATE = ("training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices")

_LONGEST = 100
"""Entries up to which a list or dict is looked through for objects."""

_LARGEST_OUTPUT = 1 << 20
"""Bytes of a module's outputs, as hidden states, up to which they are kept: larger ones, as maps of attention, are
computed again by each forward."""

_LARGEST_OF_MODULE = 64 << 20
"""Bytes of the tensors in one attribute of a module: a checkpoint would have them for each rank."""

_SCALAR, _PLAIN, _SAME_OBJECT, _GENERATOR, _STATE, _SAME = (
    "scalar",
    "plain",
    "same object",
    "generator",
    "state",
    "same",
)

Entry = tuple[str, Any]
"""(kind, value): a number or text; a Plain, of another object or of the one that was there as the training began;
(kind, state) of a generator; a state_dict; or the rank whose state_dict it is, too."""

Saved = dict[str, dict[str, Entry]]
"""By owner and attribute."""

Found = tuple[Any, str, Any]
"""(the attribute's value, its kind, what is to be saved of it: a Plain, a generator, an object with a state_dict)."""


class KeptAttributes:
    """Attributes that the training changes: plain values, generators, and objects with a state_dict.

    `owners` are the objects, by a name that is the same in each attempt; objects of the script's own classes that they
    hold, also in lists and dicts, are owners too. `saved` is what the framework saves: such objects, and what shares
    tensors with them, are left out, and so are the names in `apart`, by owner. Only what has changed since this was
    made is kept, so that what the code sets stays as the code says. All ranks make it; where they have `one_disk`,
    equal states are written once.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        saved: Iterable[Any] = (),
        *,
        apart: Mapping[str, Collection[str]] | None = None,
        one_disk: bool = True,
    ) -> None:
        self._roots, self._apart = dict(owners), dict(apart or {})
        self._ranks = RankGroup.of_world() if one_disk else None
        self._is_main = not dist.is_initialized() or dist.get_rank() == 0
        self._saved = {id(one): one for one in saved if one is not None}
        self._storages = {storage for one in self._saved.values() for storage in _storages(_tensors(one))}
        self._told: set[tuple[str, str]] = set()
        self._before: dict[str, dict[str, tuple[str, Any]]] = {}
        """By owner and attribute, its kind and by what is seen that it has changed."""
        self._objects: dict[tuple[str, str], Any] = {}
        """The lists, dicts and tensors of then: who holds one of them as well is to see what is restored."""
        for key, owner in self._owners():
            self._before[key] = {}
            for name, (value, kind, part) in self._attributes(key, owner).items():
                if kind != _STATE:
                    self._before[key][name] = kind, _mark(kind, part)
                elif (state := self._state_of(key, name, part)) is not None:
                    self._before[key][name] = kind, _state_mark(part, state)
                if kind == _PLAIN and issubclass(type(value), _CHANGED_IN_PLACE):
                    self._objects[key, name] = value

    def changed(self, plain: Saved | None = None) -> Saved:
        """What has changed, for another attempt; all ranks call it. Tensors and arrays are the objects' own, no copies.

        `plain` is what `snapshot` found earlier, for all but state_dicts.
        """
        looked = self._looked_at()
        if plain is None:
            found = self._plain(looked, copied=False)
        else:
            found = {key: dict(names) for key, names in plain.items()}
        states: dict[tuple[str, str], tuple[str, Any]] = {}
        for key, _, attributes in looked:
            for name, (_, kind, value) in attributes.items():
                if kind != _STATE or (state := self._state_of(key, name, value)) is None:
                    continue
                now, before = _state_mark(value, state), self._before.get(key, {}).get(name)
                if before is None:
                    self._tell(key, name, "it is made after the training has begun: make it in __init__")
                elif before != (_STATE, now):
                    states[key, name] = now[-1], state
        first = self._first_with(states)
        for (key, name), (_, state) in states.items():
            same = first.get((key, name))
            found.setdefault(key, {})[name] = (_STATE, state) if same is None else (_SAME, same)
        return found

    def snapshot(self) -> Saved:
        """Copies of what has changed now, without state_dicts."""
        return self._plain(self._looked_at(), copied=True)

    def _looked_at(self) -> list[tuple[str, Any, dict[str, Found]]]:
        """The owners, and what each has, by name."""
        return [(key, owner, self._attributes(key, owner)) for key, owner in self._owners()]

    def _is_too_large(self, key: str, name: str, part: Plain) -> bool:
        """Whether a module's attribute is too large to be kept; that is told, but for outputs."""
        if part.is_output and part.nbytes > _LARGEST_OUTPUT:
            return True
        if part.nbytes > _LARGEST_OF_MODULE:
            self._tell(key, name, f"it has {part.nbytes >> 20} MB: what register_buffer is given is saved")
            return True
        return False

    def _plain(self, looked: Iterable[tuple[str, Any, dict[str, Found]]], copied: bool) -> Saved:
        found: Saved = {}
        for key, owner, attributes in looked:
            before = self._before.get(key, {})
            for name, (value, kind, part) in attributes.items():
                if kind == _STATE or before.get(name) == (kind, _mark(kind, part)):
                    continue
                if kind == _GENERATOR:
                    entry = _GENERATOR, (generator_kind(part), generator_state(part))
                elif kind == _SCALAR:
                    entry = _SCALAR, value
                elif isinstance(owner, nn.Module) and self._is_too_large(key, name, part):
                    continue
                else:
                    is_same = value is self._objects.get((key, name), _NOTHING)
                    entry = _SAME_OBJECT if is_same else _PLAIN, part.copied() if copied else part
                found.setdefault(key, {})[name] = entry
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Entry]], of_rank: Callable[[int], Saved] | None = None) -> None:
        """Set what `changed` found; `of_rank` is what another rank's found, of the same checkpoint."""
        others: dict[int, Saved] = {}
        owners = dict(self._owners())
        for key, names in saved.items():
            for name, entry in names.items():
                if key not in owners:
                    self._tell(key, name, "its object is not there as the training begins: make it in __init__")
                    continue
                if entry[0] == _SAME:
                    assert of_rank is not None
                    rank = entry[1]
                    others[rank] = others.get(rank) or of_rank(rank)
                    entry = others[rank][key][name]
                self._set(key, owners[key], name, *entry)

    def _set(self, key: str, owner: Any, name: str, kind: str, value: Any) -> None:
        now = dict(fields_of(owner)).get(name)
        if kind == _SCALAR:
            put(owner, name, value)
        elif kind in (_PLAIN, _SAME_OBJECT):
            try:
                new = value.made()
            except Exception as error:  # a class that is not there any more
                self._tell(key, name, f"its value cannot be read: {error}")
                return
            if (kind == _SAME_OBJECT or value.is_content) and set_in_place(now, new):
                return
            if value.is_content:
                self._tell(key, name, "its class cannot be pickled: make it in __init__")
            elif not put(owner, name, new):
                set_in_place(now, new)
        elif kind == _GENERATOR:
            if generator_kind(now) == value[0]:
                set_generator_state(now, value[1])
        elif self._is_stateful(now):
            _load_state(now, value)
        else:
            self._tell(key, name, "there is nothing to load it into as the training begins: make it in __init__")

    def _attributes(self, key: str, owner: Any) -> dict[str, Found]:
        """An owner's that can be kept, by name."""
        found: dict[str, Found] = {}
        for name, value in self._named(key, owner):
            if type(value) in _SCALARS:  # most are, and a model has many thousands
                found[name] = value, _SCALAR, value
            elif generator_kind(value) is not None:
                found[name] = value, _GENERATOR, value
            elif self._is_stateful(value):
                found[name] = value, _STATE, value
            elif (written := plain(value)) is not None:
                tensors = (one for one in written.tensors if isinstance(one, Tensor))
                if not self._storages & set(_storages(tensors)):
                    found[name] = value, _PLAIN, written
            elif self._before.get(key, {}).get(name, ("",))[0] in (_SCALAR, _PLAIN):
                self._tell(key, name, "it has become too large to be kept, or something that cannot be saved")
        return found

    def _named(self, key: str, owner: Any) -> list[tuple[str, Any]]:
        """Those that are public, and others that the code of the owner's own class sets."""
        cls: Any = type(owner)
        own, apart = assigned_names(cls), self._apart.get(key, ())
        fields = fields_of(owner)
        return [
            (name, one)
            for name, one in fields
            if (name in own or name[:1] != "_") and name not in _NOT_STATE and name not in apart
        ]

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """The owners, and the objects of the script's own classes that they hold now."""
        seen = set(self._saved) - {id(one) for one in self._roots.values()}
        waiting = deque((key, one, 0) for key, one in self._roots.items())
        while waiting:
            key, owner, depth = waiting.popleft()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            yield key, owner
            for name, value in self._named(key, owner) if depth < _DEEPEST else ():
                if type(value) in _SCALARS:
                    continue
                if _is_looked_into(value):
                    waiting.append((f"{key}.{name}", value, depth + 1))
                elif issubclass(type(value), nn.Module) and self._is_stateful(value):  # whose parts have attributes
                    parts = [(f"{key}.{name} {path}", part, _DEEPEST) for path, part in value.named_modules()]
                    waiting.extend(parts)

    def _is_stateful(self, value: Any) -> bool:
        """Whether it has a state_dict of its own, which no other has."""
        cls = type(value)
        if issubclass(cls, (type, nn.Parameter)) or id(value) in self._saved:
            return False
        if not all(callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        if home(cls) == "torchdata" or id(dict(fields_of(value)).get("optimizer")) in self._saved:
            return False
        return not self._storages & set(_storages(_tensors(value)))

    def _state_of(self, key: str, name: str, value: Any) -> Any:
        """Its state_dict; None where it has none, as a lazy module."""
        if any(map(is_lazy, _tensors(value))):
            return None
        try:
            return tree_map(_Part.of, value.state_dict())
        except Exception as error:  # somebody else's code
            self._tell(key, name, f"its state_dict() fails: {error}")
            return None

    def _first_with(self, states: Mapping[tuple[str, str], tuple[str, Any]]) -> dict[tuple[str, str], int]:
        """The rank before this one that has the same: only that one writes it."""
        if self._ranks is None or self._ranks.world_size == 1:
            return {}
        marks = {place: (mark, checksum(state)) for place, (mark, state) in states.items()}
        everyone = self._ranks.gather(marks)
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


_NOTHING = object()

_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))

_CHANGED_IN_PLACE = (list, dict, set, deque, bytearray, np.ndarray, Tensor)


def _mark(kind: str, part: Any) -> Any:
    """By which it is seen later whether a plain value or a generator has changed."""
    if kind == _GENERATOR:
        return digest(summarise(generator_state(part), whole_up_to=1 << 16))
    return (type(part), part) if kind == _SCALAR else part.mark()


def on_device(device: torch.device) -> Callable[[Any, str], Any]:
    """For torch.load's map_location: what was on an accelerator comes to this rank's, which may be another now."""
    restore: Any = default_restore_location
    return lambda storage, place: storage if place == "cpu" else restore(storage, str(device))


def _is_looked_into(value: Any) -> bool:
    """Whether it is an object of the script's own that no state_dict stands for, or a list or dict of such."""
    cls: Any = type(value)
    if issubclass(cls, (list, tuple, dict)):
        held = list(value.values() if issubclass(cls, dict) else value) if len(value) <= _LONGEST else []
        return any(_is_kept_in_list(one) for one in held)
    if issubclass(cls, (type, FunctionType, nn.Module, Sampler, DataLoader, Enum)):
        return False
    return is_of_script(cls) and not hasattr(cls, "load_state_dict")


def _is_kept_in_list(value: Any) -> bool:
    cls = type(value)
    if issubclass(cls, (list, tuple, dict, *_OF_NO_INTEREST)):
        return False
    return (
        generator_kind(value) is not None or callable(getattr(cls, "load_state_dict", None)) or _is_looked_into(value)
    )


_OF_NO_INTEREST = (str, int, float, type, FunctionType, Tensor, np.ndarray, type(None))


# Objects with a state_dict


class _Part(NamedTuple):
    """What this rank has of a tensor that ranks share out."""

    local: Tensor

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value.to_local().detach()) if isinstance(value, DTensor) else value


def _load_state(value: Any, state: Any) -> None:
    """What ranks share out is set in place, each its part."""
    own, form = tree_flatten(value.state_dict())
    if any(isinstance(one, DTensor) for one in own):
        saved = tree_leaves(state, is_leaf=lambda one: isinstance(one, _Part))
        for number, (live, one) in enumerate(zip(own, saved, strict=True)):
            if isinstance(one, _Part):
                live.to_local().copy_(one.local)
            else:
                own[number] = one
        state = tree_unflatten(own, form)
    value.load_state_dict(state)


def _state_mark(value: Any, state: Any) -> tuple[Any, ...]:
    """By which it is seen whether a state has changed; the last is the same on all ranks for the same state.

    Changes through `.data` are not counted by torch, and of large tensors some elements are looked at.
    """
    counts = ((id(one), 0 if one.is_inference() else one._version) for one in _tensors(value))
    return (*counts, digest(summarise(state)))


def checksum(state: Any) -> int:
    """Of all bytes of a state's tensors: what is equal in some elements only is not to be taken for the same."""
    found = 0
    for one in tree_leaves(state):
        if isinstance(one, Tensor) and is_raw(one):
            data: Any = bytes_of(one.detach().cpu().resolve_conj().resolve_neg()).numpy()
            found = zlib.crc32(data, found)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that an object consists of."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
    else:
        for _, one in fields_of(value):
            yield from (leaf for leaf in _entries(one) if isinstance(leaf, Tensor))


def _entries(value: Any) -> list[Any]:
    cls = type(value)
    if issubclass(cls, dict):
        return list(value.values())
    return list(value) if issubclass(cls, (list, tuple)) else [value]


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    for one in tensors:
        one = one.to_local() if isinstance(one, DTensor) else one
        if not is_lazy(one) and is_raw(one.detach()) and one.numel():
            yield one.untyped_storage().data_ptr()
