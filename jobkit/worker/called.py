"""What a function is known by in another attempt: its name and line, and what it holds."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import functools
import inspect
import os
import random
import re
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from jobkit.checkpoint.summary import digest, summarise
from jobkit.log import log
from jobkit.train.names import named_parameters, plain_name
from jobkit.train.parallel import unwrapped

_MOST = 10_000
"""So many things are looked at in all; what holds more takes longer than it is worth."""

_WHOLE = 100_000
"""Entries up to which a list of numbers and texts, or an array, is looked at whole."""

_SAMPLE = 256
"""Entries that are looked at of what is longer, at equal distances."""

_MOST_TENSORS = 2000
"""Of the parameters of one model."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_PICKLED = (range, slice, bytearray, re.Pattern, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
"""What says in a pickle what it is."""

_SAID = (torch.dtype, torch.device, torch.layout, np.dtype)
"""What says in a text what it is."""

_MACHINERY = (
    *("jobkit.worker", "jobkit.checkpoint", "jobkit.run", "jobkit.group", "jobkit.train.engine"),
    *("jobkit.train.parallel", "torch.distributed", "torch._C", "torch._dynamo", "torch.utils.tensorboard"),
    *("logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket", "io"),
    *("_io", "weakref", "queue", "_queue", "contextvars"),
)
"""Packages of what a process has to run with, as locks, files and groups of ranks: another one in each process."""


class _TooMuch(Exception):
    """There is more to look at than `_MOST`."""


def called(function: Any, dataset: Any) -> str:
    """A function and a dataset: another text for another function, or one that holds other values.

    Values are those of closures, defaults, attributes, functools.partial, the object of a bound method and, of globals,
    plain ones: numbers, texts, tensors, models, functions and objects, in lists and dicts too. Long lists and large
    tensors are looked at in parts. Of objects that are written in another language, and of what a process runs with,
    the type is known alone. What holds too much, or cannot be looked at, has another text each time.
    """
    try:
        name = getattr(inspect.unwrap(function), "__qualname__", type(function).__qualname__)
        held = digest(summarise(_held([function, dataset]), whole_up_to=1000, most=_MOST))
    except Exception as error:  # a user's object may raise anything where it is looked at
        log.debug("an evaluation that is broken off will be repeated: %s: %s", type(error).__name__, error)
        name, held = type(function).__qualname__, uuid.uuid4().hex
    return f"{name} of {type(dataset).__qualname__}, {held}"


_Found = tuple[list[Any], list[Any]]
"""Texts and tensors that stand for a value, and the values in it that are to be looked at next."""


def _held(values: Sequence[Any]) -> list[Any]:
    """What stands for some values and all that they hold: plain values and tensors, the same in another process."""
    found: list[Any] = []
    seen: dict[int, tuple[int, Any]] = {}  # with the value: another one could get the address of one that is gone
    waiting, looks = list(reversed(values)), 0
    while waiting:
        value, looks = waiting.pop(), looks + 1
        if looks > _MOST:
            raise _TooMuch(f"it holds more than {_MOST} things")
        if type(value) in _PLAIN:
            found.append(value)
        elif id(value) in seen:
            found.append(f"as number {seen[id(value)][0]}")
        else:
            seen[id(value)] = len(seen), value
            leaves, inside = _looked_at(value)
            found += [f"{_kind(value)} of {len(leaves)} and {len(inside)}", *leaves]
            waiting += reversed(inside)
    return found


def _looked_at(value: Any) -> _Found:
    for kinds, look in _LOOKS:
        if isinstance(value, kinds):
            return look(value)
    if _is_of(value, _MACHINERY):
        return [], []
    own = _attributes(value)
    return [], [own] if own else []


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_of(value: Any, packages: Sequence[str]) -> bool:
    module = f"{type(value).__module__}."
    return any(module.startswith(f"{package}.") for package in packages)


def _attributes(value: Any) -> dict[str, Any]:
    """Those of the object itself, in its dict and in slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                found[name] = member.__get__(value)
    return dict(sorted(found.items()))


# Of each kind


def _of_tensor(value: Tensor) -> _Found:
    return _tensor_leaves(value), []


def _tensor_leaves(value: Tensor) -> list[Any]:
    """One or more dense tensors with its values, or a text where it has none."""
    if is_lazy(value):
        return ["uninitialized"]
    if value.is_nested:
        parts = value.unbind()
        return [f"{value.layout} of {len(parts)}", *parts]
    if value.layout == torch.sparse_coo:
        return [f"{value.layout} {list(value.shape)}", value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [f"{value.layout} {list(value.shape)}", value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [f"{value.layout} {list(value.shape)}", value.ccol_indices(), value.row_indices(), value.values()]
    if value.is_quantized:
        return [f"{value.dtype} {value.qscheme()}", value.dequantize()]
    return [value]


def _of_array(value: Any) -> _Found:
    """An array of NumPy, or one number."""
    value = np.asarray(value)
    places = _places(value.size, _WHOLE)
    some = value.flat[np.fromiter(places, np.int64)]
    about = f"{value.dtype} {value.shape}"
    return ([about], [some.tolist()]) if value.dtype.hasobject else ([about, some.tobytes()], [])


def _of_module(value: nn.Module) -> _Found:
    module = unwrapped(value)
    is_sharded = isinstance(module, FSDPModule)  # whose parameters are whole or not, as it was used last
    parameters = list(named_parameters(module).items())
    leaves: list[Any] = [_kind(module), len(parameters)]
    for name, one in (parameters[place] for place in _places(len(parameters), _MOST_TENSORS, _MOST_TENSORS)):
        leaves += [name, *(["sharded", repr(one.shape)] if is_sharded else _tensor_leaves(one))]
    inside: list[Any] = [{plain_name(name): one for name, one in module.named_buffers()}]
    for name, part in module.named_modules():
        public = {key: one for key, one in sorted(vars(part).items()) if not key.startswith("_")}
        plain = {key: one for key, one in public.items() if type(one) in _PLAIN}
        leaves += [plain_name(name), repr(plain)]
        inside += [one for key, one in public.items() if key not in plain]
    return leaves, inside


def _of_optimizer(value: torch.optim.Optimizer) -> _Found:
    """Its settings and parameters: what it remembers follows from the step, and its hooks are of the process."""
    return [], list(value.param_groups)


def _of_function(value: Any) -> _Found:
    code = value.__code__
    names = dict.fromkeys(name for one in _codes(code) for name in one.co_names)
    plain = {name: one for name in names if type(one := value.__globals__.get(name)) in _PLAIN}
    cells = [_of_cell(cell) for cell in value.__closure__ or ()]
    where = [value.__module__, value.__qualname__, code.co_firstlineno]
    return where, [value.__defaults__, value.__kwdefaults__, cells, plain, vars(value)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """That of a function and of the functions and comprehensions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return None


def _of_builtin(value: Any) -> _Found:
    return [value.__qualname__], [] if isinstance(value.__self__, types.ModuleType) else [value.__self__]


def _of_class(value: type) -> _Found:
    own = {name: one for name, one in vars(value).items() if type(one) in _PLAIN and not name.startswith("__")}
    return [value.__module__, value.__qualname__], [own]


def _of_sequence(value: Any) -> _Found:
    values = value if isinstance(value, (list, tuple)) else list(value)
    is_plain = len(values) <= _WHOLE and set(map(type, values)) <= set(_PLAIN)
    leaves = [repr(list(values))] if is_plain else [len(values)]
    inside = [] if is_plain else [values[place] for place in _places(len(values), _SAMPLE)]
    return leaves, [*inside, *_beside(value)]


def _of_dict(value: dict[Any, Any]) -> _Found:
    items = list(value.items())
    some = [items[place] for place in _places(len(items), _SAMPLE)]
    return [len(items)], [*(one for pair in some for one in pair), *_beside(value)]


def _of_set(value: Any) -> _Found:
    """In the order of their texts: a set's own differs from process to process."""
    return [], [sorted(map(repr, value)), *_beside(value)]


def _beside(value: Any) -> list[Any]:
    """The attributes of an object of a class that the user has derived from one of Python's."""
    return [] if type(value).__module__ in ("builtins", "collections") else [_attributes(value)]


def _places(length: int, whole_up_to: int, sample: int = _SAMPLE) -> Sequence[int]:
    """The places to look at, the first and the last among them."""
    if length <= whole_up_to:
        return range(length)
    return [number * (length - 1) // (sample - 1) for number in range(sample)]


_LOOKS: tuple[tuple[Any, Callable[[Any], _Found]], ...] = (
    (Tensor, _of_tensor),
    ((np.ndarray, np.generic), _of_array),
    (array.array, lambda value: _of_array(np.frombuffer(value, value.typecode))),
    (nn.Module, _of_module),
    (torch.optim.Optimizer, _of_optimizer),
    (torch.Generator, lambda value: ([value.get_state()], [])),
    (np.random.Generator, lambda value: ([], [value.bit_generator.state])),
    (np.random.RandomState, lambda value: ([], [value.get_state()])),
    (random.Random, lambda value: ([], [value.getstate()])),
    (types.ModuleType, lambda value: ([value.__name__], [])),
    (type, _of_class),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda value: ([], [value.__func__, value.__self__])),
    (types.BuiltinFunctionType, _of_builtin),
    (functools.partial, lambda value: ([], [value.func, value.args, value.keywords, vars(value)])),
    (os.PathLike, lambda value: ([os.fspath(value)], [])),
    (enum.Enum, lambda value: ([value.name], [])),
    (BaseContainer, lambda value: ([], [OmegaConf.to_container(value, resolve=False)])),
    (_SAID, lambda value: ([repr(value)], [])),
    ((*_PLAIN, *_PICKLED), lambda value: ([value], [])),
    ((list, tuple, collections.deque), _of_sequence),
    (dict, _of_dict),
    ((set, frozenset), _of_set),
)
"""Kinds of values, the first that fits, and how they are looked at."""
