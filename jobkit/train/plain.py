"""Plain values, tensors and arrays included, written down: they can be compared, copied and made again."""

from __future__ import annotations

import datetime
import hashlib
import io
import pickle
from collections import deque
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.state import is_raw
from jobkit.checkpoint.summary import digest, summarise

MOST_BYTES = 16 << 20
"""Of a value without its tensors and arrays, up to which it is looked at: lists of more are data mostly."""

_WHOLE_ELEMENTS = 1 << 16
"""Of a tensor, up to which all of them are compared. Torch counts the changes of a larger one, but through `.data`."""

_WHOLE_BYTES = 64 << 20
"""Of an array, up to which all of it is compared."""

_SIMPLE = frozenset((bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset))

_KINDS: tuple[Any, ...] = (
    *(*_SIMPLE, bytearray, deque, range, slice, Enum, PurePath, datetime.date, datetime.time, datetime.timedelta),
    *(np.generic, np.ndarray, np.dtype, torch.dtype, torch.device),
)

_BY_NAME: tuple[Any, ...] = (type, FunctionType, BuiltinFunctionType)
"""What pickle writes down as a name: the class of an Enum, the maker of a deque."""


class Plain(NamedTuple):
    """A plain value: its pickle, and the tensors and arrays that this has left out."""

    pickled: bytes
    tensors: list[Any]
    are_trained: list[bool]
    """Of each tensor, whether it is a leaf that requires a gradient."""
    is_output: bool
    """Whether a tensor still has the graph of what it was computed from."""
    is_content: bool = False
    """Whether it is what a dict holds, whose class or default cannot be written down."""

    @property
    def nbytes(self) -> int:
        """Of the tensors and arrays."""
        return sum(one.nbytes for one in self.tensors)

    def copied(self) -> Plain:
        """What stays as it is while the value goes on."""
        copies = [one.copy() if isinstance(one, np.ndarray) else one.clone() for one in self.tensors]
        return self._replace(tensors=copies)

    def made(self) -> Any:
        """The value, with copies of the tensors. Raises what pickle raises, where a class is not there any more."""
        return _Reader(self.copied()).load()

    def mark(self) -> tuple[Any, ...]:
        """By which it is seen in this process whether the value has changed."""
        tensors = [one for one in self.tensors if isinstance(one, Tensor)]
        counts = [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in tensors if is_raw(one)]
        arrays = [_digest_of_array(one) for one in self.tensors if isinstance(one, np.ndarray)]
        looked = digest(summarise(tensors, whole_up_to=_WHOLE_ELEMENTS)) if tensors else ""
        return hashlib.blake2b(self.pickled, digest_size=16).digest(), counts, arrays, looked


def plain(value: Any) -> Plain | None:
    """A plain value, whose tensors are those of the value, no copies; None for anything else, or too much."""
    if issubclass(type(value), _BY_NAME):  # isinstance would ask a proxy for what it stands for
        return None
    found = _written(value)
    if found is None and issubclass(type(value), dict):
        found = _written(dict(value))  # as of a defaultdict with a lambda, which nobody can pickle
        return None if found is None else found._replace(is_content=True)
    return found


def _written(value: Any) -> Plain | None:
    writer = _Writer()
    try:
        writer.dump(value)
    except Exception:  # what is not plain, a class within a function, a list in a list in a list ...
        return None
    trained = [isinstance(one, Tensor) and one.requires_grad and one.is_leaf for one in writer.tensors]
    is_output = any(isinstance(one, Tensor) and not one.is_leaf for one in writer.tensors)
    detached = [one.detach() if isinstance(one, Tensor) else one for one in writer.tensors]
    return Plain(writer.buffer.getvalue(), detached, trained, is_output)


class _NotPlain(Exception):
    pass


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise _NotPlain
        return super().write(data)


class _Writer(pickle.Pickler):
    def __init__(self) -> None:
        self.buffer = _Limited()
        super().__init__(self.buffer, protocol=4)
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _SIMPLE:
            return None
        is_tensor = isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, DTensor))
        if is_tensor or (isinstance(value, np.ndarray) and value.dtype.kind not in "OV"):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return self._numbers[id(value)]
        if isinstance(value, (*_KINDS, *_BY_NAME)):
            return None
        raise _NotPlain


class _Reader(pickle.Unpickler):
    def __init__(self, value: Plain) -> None:
        super().__init__(io.BytesIO(value.pickled))
        self._tensors = [
            one.requires_grad_() if is_trained else one
            for one, is_trained in zip(value.tensors, value.are_trained, strict=True)
        ]

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def _digest_of_array(array: Any) -> tuple[int, str]:
    if array.nbytes > _WHOLE_BYTES:
        return id(array), digest(summarise(array[:: max(1, len(array) // 1000)] if array.ndim else array))
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    return 0, hashlib.blake2b(data, digest_size=16).hexdigest() + array.dtype.str + str(array.shape)
