"""What lives in a program and may have been forgotten. Only the runs of `jobkit verify` look.

    names in frames and modules of the user's files --Looker.look--> {expression: Seen}, and About each

A name is followed through containers, and through attributes, slots and cells of objects of the user's own files.
Nothing is asked for by getattr, which may run code, and nothing within installed packages is looked into, but for what
their modules and state_dicts hold. trace.py writes what is found; verify/forgotten.py judges.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from jobkit.checkpoint.digests import local, storage_of, tensor_digests
from jobkit.checkpoint.tree import flatten
from jobkit.run.records import About, Seen, SeenKind

HOST_BYTES, DEVICE_BYTES = 1 << 29, 1 << 36
"""Bytes of tensors in a look: half a gigabyte of the host's takes 0.1 s. The largest are left out, and named."""

MOST_OBJECTS = 20_000
"""In a look."""

MOST_ITEMS, MOST_VISITED, MOST_READ = 64, 1_000, 100_000
"""A longer container of plain values is one value; of one with more than MOST_VISITED things MOST_ITEMS are looked at,
and of more than MOST_READ plain values only the number."""

MOST_TEXT = 80
"""Characters of a value that is written as it is."""

INSTALLED = ("/site-packages/", "/dist-packages/", f"{Path(random.__file__).parent}/", f"{Path(__file__).parents[1]}/")
PLAIN = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, type(None))
CONTAINERS = (list, tuple, set, frozenset, deque)
HOLDERS = (argparse.Namespace, types.SimpleNamespace)
"""The standard library's objects of a program's own attributes."""

ITERATORS = (itertools.cycle, itertools.islice, itertools.chain, zip, map, enumerate)

EMPTY = flatten({}).skeleton

OPTIMIZED = 1
"""The flag of code whose frames keep their locals outside of a dict."""

GENERATORS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda value: value.get_state().cpu().numpy().tobytes(),
    np.random.Generator: lambda value: value.bit_generator.state,
    np.random.RandomState: lambda value: value.get_state(),
    random.Random: lambda value: value.getstate(),
}
"""Their states."""


@dataclass(slots=True)
class _Found:
    expression: str
    value: Any
    about: About
    kind: SeenKind = "value"
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By their names within it."""
    text: str = ""
    """The plain values within it."""


class Looker:
    """Looks at a process, again and again.

    looker = Looker()
    looker.look(storages=set(), objects=set())      # {"ema": Seen("state", ...), "best": Seen("value", "0.5", ...)}
    """

    def __init__(self) -> None:
        self.about: dict[str, About] = {}
        """Of each expression that a look has found."""
        self.left_out: dict[str, int] = {}
        """Expressions of things that were too large, and their bytes; "" for what came after MOST_OBJECTS."""
        self._before: dict[str, Callable[[], Any]] = {}

    def look(self, storages: Collection[int], objects: Collection[int]) -> dict[str, Seen]:
        """Return what the names lead to. What is tracked is left out: tensors by their storages, and objects by id."""
        walk = _Walk(storages, objects)
        queue = deque(_names(sys._getframe(1)))
        while queue and len(walk.noted) < MOST_OBJECTS:
            item = queue.popleft()
            try:
                queue.extend(walk.visit(item))
            except Exception:  # a dead proxy, a class whose attributes are code: it is not this look that may end a run
                self.left_out[item.expression] = 0
        if queue:
            self.left_out[""] = len(queue)
        self.about |= {expression: item.about for expression, item in walk.noted.items()}
        _leave_out_parts(walk.noted)
        looked_at = [item for item in walk.noted.values() if not self._is_too_much(item)]
        digests, before = self._digests(looked_at), self._before
        self._before = {item.expression: _reference(item.value) for item in looked_at}
        return {
            item.expression: Seen(
                kind=item.kind,
                digest=_number(item) or _joined(item.text, digests[item.expression]),
                is_same=item.expression in before and before[item.expression]() is item.value,
                is_scalar=_is_scalar(item),
                size=sum(tensor.numel() for tensor in item.tensors.values()),
            )
            for item in looked_at
            if item.expression in digests
        }

    def _digests(self, items: Sequence[_Found]) -> dict[str, list[str]]:
        """Return the digests of each thing's tensors; none of a thing with a tensor of an odd kind."""
        leaves = {f"{number}/{name}": leaf for number, item in enumerate(items) for name, leaf in item.tensors.items()}
        try:
            digests = tensor_digests(leaves)  # together: the sums of a device come to the host at once
        except Exception:
            if len(items) > 1:
                return {name: digests for item in items for name, digests in self._digests([item]).items()}
            self.left_out[items[0].expression] = 0
            return {}
        return {
            item.expression: [digests[f"{number}/{name}"] for name in item.tensors] for number, item in enumerate(items)
        }

    def _is_too_much(self, item: _Found) -> bool:
        limits = {True: HOST_BYTES, False: DEVICE_BYTES}
        nbytes = {True: 0, False: 0}
        for tensor in item.tensors.values():
            nbytes[tensor.device.type == "cpu"] += tensor.nbytes
        is_too_much = any(nbytes[place] > limits[place] for place in limits)
        if is_too_much:
            self.left_out[item.expression] = sum(nbytes.values())
        return is_too_much


def _leave_out_parts(items: dict[str, _Found]) -> None:
    """Leave out what is a part of a state that was found: who tracks the whole has it."""
    wholes = [item for item in items.values() if item.kind == "state"]
    of_storage: dict[int, list[tuple[_Found, set[int]]]] = {}
    for whole in wholes:
        storages = {storage_of(tensor) for tensor in whole.tensors.values()}
        for storage in storages:
            of_storage.setdefault(storage, []).append((whole, storages))
    texts = [whole for whole in wholes if not whole.tensors]
    for expression, item in list(items.items()):
        mine = {storage_of(tensor) for tensor in item.tensors.values()}
        owners = [whole for whole, storages in of_storage.get(next(iter(mine), 0), []) if mine < storages]
        if item.kind == "state":
            begins = [(f"{whole.expression}.", f"{whole.expression}[") for whole in wholes]
            owners += [whole for whole, begin in zip(wholes, begins, strict=True) if expression.startswith(begin)]
            if not mine and len(item.text) > MOST_TEXT:
                owners += [whole for whole in texts if item.text in whole.text]
        if any(whole is not item and whole.expression in items for whole in owners):
            del items[expression]


def _joined(text: str, digests: list[str]) -> str:
    """Return one digest; a short text alone stays as it is."""
    whole = " ".join([text, *digests]) if digests else text
    return whole if len(whole) <= MOST_TEXT and not digests else xxhash.xxh3_128_hexdigest(whole.encode())


def _number(item: _Found) -> str:
    """Return a tensor of one number as that number, for a person to read."""
    is_here = isinstance(item.value, np.ndarray) or (isinstance(item.value, torch.Tensor) and not item.value.is_cuda)
    return repr(item.value.item()) if is_here and _is_scalar(item) else ""


def _is_scalar(item: _Found) -> bool:
    if isinstance(item.value, np.ndarray):
        return item.value.size == 1
    return all(tensor.numel() == 1 for tensor in item.tensors.values())


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that gives the object as long as it lives: the next one may have its id."""
    try:
        return weakref.ref(value)
    except TypeError:  # a torch.Generator, a number: small
        return lambda: value


def _names(frame: types.FrameType | None) -> Iterator[_Found]:
    """Yield the names of the user's modules whose code is under way, of its frames, and of other modules of the user's.

    The outermost frame comes first: its names are there at each boundary, while a method that makes the batches has
    returned at some, and knows an object as `self`.
    """
    frames: list[types.FrameType] = []
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            frames.insert(0, frame)
        frame = frame.f_back
    under_way = {id(frame.f_globals) for frame in frames}
    modules = [module for module in list(sys.modules.values()) if type(module) is types.ModuleType]
    modules = [module for module in modules if _is_own(vars(module).get("__file__"))]
    for module in modules:
        if id(vars(module)) in under_way:
            yield from _items(vars(module), "", str(module.__file__), "")
    for frame in frames:
        if frame.f_code.co_flags & OPTIMIZED:
            names = frame.f_locals
            yield from _items(names, "", frame.f_code.co_filename, frame.f_code.co_name)
            if type(names) is dict:  # before Python 3.13 the frame keeps it, and with it this step's tensors
                names.clear()
    for module in modules:
        if id(vars(module)) not in under_way:
            yield from _items(vars(module), f"{module.__name__}.", str(module.__file__), "")


def _items(names: Mapping[str, Any], prefix: str, file: str, scope: str) -> Iterator[_Found]:
    for name, value in list(names.items()):
        if name != "_" and not name.startswith(("__", ".")):  # .0 is the iterator of a comprehension
            yield _of_name(f"{prefix}{name}", name, value, file, scope)


def _of_name(expression: str, name: str, value: Any, file: str, scope: str) -> _Found:
    place, kind = f"in {scope}()" if scope else f"in {Path(file).name}", type(value).__name__
    about = About(type=kind, way="values", owner=expression, name=name, file=file, scope=scope, place=place)
    return _Found(expression, value, about)


def _of_attribute(about: About, owner: str, name: str, kind: type) -> About:
    keeper = owner if _has_state(kind) and not issubclass(kind, nn.Module) else ""
    more = {"name": name, "file": str(_file_of(kind)), "holder": kind.__name__, "keeper": keeper}
    return replace(about, way="attributes", owner=owner, **more)


def _as_whole(item: _Found, way: Any = "track") -> None:
    """Note that a thing itself can be tracked, whatever holds it."""
    item.about = replace(item.about, way=way, owner=item.expression)


def _is_own(file: Any) -> bool:
    """Return whether a file is the user's: none of Python's, of an installed package's, or of jobkit's."""
    return isinstance(file, str) and not file.startswith("<") and not any(part in file for part in INSTALLED)


def _file_of(kind: type) -> Any:
    module = sys.modules.get(kind.__module__)
    return vars(module).get("__file__") if module is not None else None


def _has_state(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


class _Walk:
    """One look."""

    def __init__(self, storages: Collection[int], objects: Collection[int]) -> None:
        self._storages, self._objects = storages, objects
        self._visited: dict[int, Any] = {}
        """The objects so far, by id; they are kept, for an id is another object's once its object is gone."""
        self.noted: dict[str, _Found] = {}

    def visit(self, item: _Found) -> Iterator[_Found]:
        """Note a thing, and yield what lies in it."""
        value, kind = item.value, type(item.value)
        if item.expression in self.noted:
            return
        if _is(value, PLAIN):
            self._note(item, text=_text(value))
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if kind.__module__.partition(".")[0] == "jobkit" or _is(value, DataLoader):
            return  # a loader's state_dict, as torchdata's, may begin a pass
        if _is(value, np.ndarray) and value.dtype.hasobject:
            yield from self._container(item, list(value.flat))
        elif _is(value, torch.Tensor) and value.layout is torch.sparse_coo:
            self._note(item, "tensor", {"indices": value._indices(), "values": value._values()})
        elif _is(value, (torch.Tensor, np.ndarray)):
            self._note(item, "tensor", {"": value})
        elif kind in GENERATORS:
            ways: dict[type, Any] = {torch.Generator: "track", np.random.Generator: "bit_generator"}
            _as_whole(item, ways.get(kind, "own_state"))
            self._note(item, "generator", text=repr(GENERATORS[kind](value)))
        elif _is(value, nn.Module):
            yield from self._module(item, value)
        elif _is(value, (dict, *CONTAINERS)):
            yield from self._container(item, value)
        elif _is(value, (_BaseDataLoaderIter, types.GeneratorType, *ITERATORS)):
            if (taken := _batches_taken(value)) is not None:
                _as_whole(item, "loader")
                self._note(item, text=f"{taken} batch{'es' if taken != 1 else ''}")
        elif _is(value, types.FunctionType):
            yield from self._cells(item, value)
        elif _is(value, types.MethodType):
            yield _Found(f"{item.expression}.__self__", value.__self__, item.about)
        elif _is(value, type):
            if _is_own(_file_of(value)):
                yield from self._attributes(item, vars(value), value)
        else:
            if _has_state(kind) and id(value) not in self._objects:
                self._state(item, value)
            names = _attributes_of(value)
            if not _is(value, HOLDERS) and not _is_own(_file_of(kind)):  # as a Trainer's list of callbacks
                names = {name: attribute for name, attribute in names.items() if _has_own(attribute)}
            yield from self._attributes(item, names, kind)

    def _note(
        self, item: _Found, kind: SeenKind = "value", tensors: Mapping[str, Any] | None = None, text: str = ""
    ) -> None:
        item.kind, item.text = kind, text
        for name, value in (tensors or {}).items():
            tensor = _as_tensor(value)
            if tensor is not None and storage_of(tensor) not in self._storages:
                item.tensors[name] = tensor
        if item.tensors or text:
            self.noted[item.expression] = item

    def _is_tracked(self, tensor: Any) -> bool:
        plain = _as_tensor(tensor)
        return plain is None or storage_of(plain) in self._storages

    def _module(self, item: _Found, module: nn.Module) -> Iterator[_Found]:
        """A module is one thing, unless it is tracked or all of its state is; what no state_dict has stands alone."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        parts = dict(module.named_modules())
        self._visited |= {id(part): part for part in parts.values()}
        untracked = {name: tensor for name, tensor in tensors.items() if not self._is_tracked(tensor)}
        passing = {f"{path}.{name}".lstrip(".") for path, part in parts.items() for name in _non_persistent(part)}
        whole = {name: tensor for name, tensor in untracked.items() if name not in passing}
        if whole and id(module) not in self._objects:
            _as_whole(item)
            self._note(item, "state", whole)
            untracked = {name: tensor for name, tensor in untracked.items() if name in passing}
        for name, tensor in untracked.items():
            path, _, key = name.rpartition(".")
            owner = f"{item.expression}.{path}".rstrip(".")
            kind = type(parts.get(path, module))
            about = replace(_of_attribute(item.about, owner, key, kind), type=type(tensor).__name__)
            self._visited[id(tensor)] = tensor
            self._note(_Found(f"{item.expression}.{name}", tensor, about), "tensor", {"": tensor})
        for path, part in parts.items():
            names = _attributes_of(part)
            if not _is_own(_file_of(type(part))):  # a metric of a library has its sums as attributes
                names = {name: value for name, value in names.items() if _is(value, torch.Tensor)}
            inner = _Found(f"{item.expression}.{path}".rstrip("."), part, item.about)
            yield from self._attributes(inner, names, type(part))

    def _container(self, item: _Found, value: Any) -> Iterator[_Found]:
        try:
            items = _ends_of(value)
        except RuntimeError:  # another thread changes it
            return
        length, is_plain = len(value), all(_is(member, PLAIN) for _, member in items)
        is_read = MOST_ITEMS < length <= MOST_READ and is_plain
        self._note(item, text=_text(value) if is_read else f"{type(value).__name__} of {length}")
        for number, (key, member) in enumerate(() if is_plain and length > MOST_ITEMS else items):
            about = replace(item.about, type=type(member).__name__)
            name = repr(key) if _is(key, (*PLAIN, tuple)) else f"<{type(key).__name__} {number}>"
            yield _Found(f"{item.expression}[{name}]", member, about)

    def _cells(self, item: _Found, function: types.FunctionType) -> Iterator[_Found]:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing is assigned yet
                continue
            if _is_own(code.co_filename):
                variable = _of_name(name, name, value, code.co_filename, "")
                yield replace(variable, expression=f"{item.expression}.{name}")

    def _attributes(self, item: _Found, names: Mapping[str, Any], kind: type) -> Iterator[_Found]:
        for name, value in list(names.items()):
            if not name.startswith("__"):
                about = item.about
                if about.way != "track":  # else the holder can be tracked as a whole
                    about = _of_attribute(about, item.expression, name, kind)
                about = replace(about, type=type(value).__name__)
                yield _Found(f"{item.expression}.{name}", value, about)

    def _state(self, item: _Found, value: Any) -> None:
        """Note an object with a state_dict, unless it shares memory with what is tracked."""
        try:
            tree = flatten(value.state_dict())
        except (Exception, SystemExit):  # it may have no state at this moment
            return
        leaves = dict(tree.leaves)
        if tree.skeleton == EMPTY:  # as that of a callback which keeps nothing
            return
        if not any(storage_of(leaf) in self._storages for leaf in leaves.values()):
            _as_whole(item)
            text = json.dumps(tree.skeleton)  # that of a part is within it
            self._visited[id(tree)] = tree
            self._note(item, "state", leaves, text)


def _ends_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a container; of a long one, as a dataset in memory, those at its ends."""
    if len(value) <= MOST_VISITED:
        if _is(value, (set, frozenset)):
            value = sorted(value, key=repr)  # its order differs by process
        return list(dict.items(value)) if _is(value, dict) else list(enumerate(value))
    if _is(value, (list, tuple, deque)):
        numbers = [*range(MOST_ITEMS // 2), *range(len(value) - MOST_ITEMS // 2, len(value))]
        return [(number, value[number]) for number in numbers]
    return list(itertools.islice(dict.items(value) if _is(value, dict) else enumerate(value), MOST_ITEMS))


def _batches_taken(iterator: Any) -> int | None:
    """Return how many batches of a DataLoader an iterator has given, in its pass; None where it gives others."""
    if _is(iterator, _BaseDataLoaderIter):
        return int(vars(iterator)["_num_yielded"])
    is_own = _is(iterator, types.GeneratorType) and _is_own(iterator.gi_code.co_filename)
    if not is_own and not _is(iterator, ITERATORS):
        return None
    parts = gc.get_referents(iterator)  # the iterator of its `for` has no name
    taken = [count for part in parts if (count := _batches_taken(part)) is not None]
    return taken[0] if taken else 0 if any(_is(part, DataLoader) for part in parts) else None


def _attributes_in(value: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:  # slots alone; `hasattr` would ask its __getattr__
        return {}


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that lie in an object, in its __dict__ and its slots; those of nn.Module's own are none."""
    names = _attributes_in(value)
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if _is(slot, types.MemberDescriptorType):
                try:
                    names[name] = slot.__get__(value)
                except AttributeError:  # nothing is assigned yet
                    continue
    if _is(value, nn.Module):
        names = {name: attribute for name, attribute in names.items() if name not in _OF_MODULES}
    return names


_OF_MODULES = frozenset(vars(nn.Module()))


def _has_own(value: Any) -> bool:
    """Return whether a thing is of the user's classes, or a short list that has such a thing."""
    things = value if _is(value, (list, tuple)) and len(value) <= MOST_ITEMS else [value]
    return any(_is_own(_file_of(type(thing))) for thing in things)


def _non_persistent(module: nn.Module) -> Collection[str]:
    return set[str](_attributes_in(module).get("_non_persistent_buffers_set", ()))


def _is(value: Any, kinds: Any) -> bool:
    """Return isinstance by the type alone: a proxy and a mock say something else of their class, by code."""
    return issubclass(type(value), kinds)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor or an array as a tensor on this rank; None where it has no plain memory."""
    if _is(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        return torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    if is_lazy(value):
        return None
    value = local(value)
    is_plain = value.layout is torch.strided and not value.is_meta and not value.is_nested
    return value if is_plain else None


def _text(value: Any) -> str:
    if _is(value, np.generic):
        value = value.item()  # its repr has its type
    return repr(sorted(value, key=repr) if _is(value, (set, frozenset)) else value)
