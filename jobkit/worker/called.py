"""What a function is known by in another attempt: its name and line, and what it holds."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset, TensorDataset

from jobkit.checkpoint.summary import digest, summarise
from jobkit.train.names import named_parameters
from jobkit.train.parallel import unwrapped

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_LONGEST = 1000
"""Up to so many entries a list or dict is looked into."""

_DEEPEST = 4
"""So far functions are followed into those that they call."""


def called(function: Any, dataset: Any) -> str:
    """A function and a dataset: another text for another function, or one that holds other values.

    Values are those of closures, defaults, functools.partial and, of globals, of plain ones: numbers, texts, tensors,
    models and functions, in lists and dicts too. Of other objects the type is known alone.
    """
    name = getattr(inspect.unwrap(function), "__qualname__", type(function).__qualname__)
    return f"{name} of {type(dataset).__qualname__}, {digest(summarise([_held(function, 0), _of_dataset(dataset)]))}"


def _held(value: Any, depth: int) -> Any:
    """What stands for a value: a tree that can be summarised, and is the same in another process."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return value
    if isinstance(value, nn.Module):
        module = unwrapped(value)
        is_sharded = isinstance(module, FSDPModule)  # whose parameters are whole or not, as it was used last
        held = named_parameters(module).items()
        return type(module).__qualname__, {name: list(one.shape) if is_sharded else one for name, one in held}
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST:
        return [_held(one, depth + 1) for one in value]
    if isinstance(value, dict) and len(value) <= _LONGEST:
        return {str(key): _held(one, depth + 1) for key, one in value.items()}
    if isinstance(value, functools.partial):
        return [_held(one, depth + 1) for one in (value.func, value.args, value.keywords)]
    if inspect.ismethod(value):
        return [_held(value.__func__, depth + 1), _held(value.__self__, depth + 1)]
    if inspect.isfunction(value):
        return _of_function(value, depth)
    return type(value).__qualname__


def _of_function(function: Any, depth: int) -> Any:
    code = function.__code__
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_held(cell.cell_contents, depth + 1))
        except ValueError:  # it has no value yet
            cells.append(None)
    plain = {name: one for name in code.co_names if isinstance(one := function.__globals__.get(name), _PLAIN)}
    defaults = _held([function.__defaults__, function.__kwdefaults__], depth + 1)
    return [function.__module__, function.__qualname__, code.co_firstlineno, defaults, cells, plain]


def _of_dataset(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        indices = dataset.indices
        return [indices[place] for place in (0, len(indices) // 2, -1)], _of_dataset(dataset.dataset)
    if isinstance(dataset, TensorDataset):
        return list(dataset.tensors)
    return type(dataset).__qualname__
