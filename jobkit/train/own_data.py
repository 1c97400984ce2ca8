"""Lists and arrays that samplers and streams change themselves, as an order that each pass shuffles in place."""

from __future__ import annotations

import hashlib
import marshal
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from jobkit.log import log

MOST_BYTES = 64 << 20
"""Up to which one is kept."""

_MOST_OF_DATASETS = 1 << 20
"""The same, of what has samples by their number: its lists are data mostly, which nobody changes."""

_LISTS = (list, tuple, deque, dict)

_BYTES_OF_ONE = 5
"""That an entry of a list takes at least."""


Data = tuple[bytes, str, Any]
"""(digest, form, what it holds, where it has changed since it was first seen in this process, else None)."""


def may_be_data(owner: Any, value: Any) -> bool:
    """Whether an attribute may hold an order."""
    if isinstance(value, torch.Tensor):
        # What is shared is the main process's to set, as the epoch of a Hugging Face stream.
        is_kind = type(value) is torch.Tensor and not value.is_meta and value.dim() > 0 and not _is_shared(value)
    else:
        is_kind = isinstance(value, _LISTS) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return is_kind and (is_order(owner) or isinstance(owner, Dataset))


_OF_NUMPY = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)
"""Types of tensors that NumPy has, too."""


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def found(owner: Any, name: str, value: Any) -> Data | None:
    """What another attempt needs of an attribute; None of what is no plain data, or too large to look at."""
    most = _most(owner)
    form, content = _content(value, most)
    if not form:
        return None
    digest = hashlib.blake2b(content, digest_size=16).digest()
    changed = digest != _first(owner).setdefault(name, digest)
    if form == _SAMPLE:
        if changed and is_order(owner):
            tell_too_large(owner, name, most)
        return None
    return digest, *((form, _copy(form, content, value)) if changed else ("", None))


def put(owner: Any, name: str, value: Any, data: Data) -> None:
    """Let an attribute hold what `found` found."""
    now, (digest, form, held) = found(owner, name, value), data
    if held is None or now is None or now[0] == digest:
        return
    new = marshal.loads(held) if form == _PLAIN else held
    if isinstance(value, list):
        value[:] = list(new)
    elif isinstance(value, deque):
        value.clear()
        value.extend(new)
    elif isinstance(value, dict):
        value.clear()
        value.update(new)
    elif isinstance(value, tuple):
        setattr(owner, name, tuple(new))
    elif isinstance(value, np.ndarray) and value.dtype == new.dtype and value.shape == new.shape:
        np.copyto(value, new)
    else:
        setattr(owner, name, new.to(value.device) if isinstance(value, torch.Tensor) else new.copy())


_PLAIN, _ARRAY, _TENSOR, _SAMPLE = "plain", "array", "tensor", "a sample"


def _content(value: Any, most: int) -> tuple[str, bytes]:
    """(form, bytes that are equal for equal values); no form where there are none."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or type(value) is not torch.Tensor or value.dtype not in _OF_NUMPY:
            return "", b""
        form, found = _content(_as_array(value), most)
        return (_TENSOR if form == _ARRAY else form), found
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufUS":
            return "", b""
        about = repr((value.dtype.str, value.shape)).encode()
        if value.nbytes > most:
            return _SAMPLE, about + value.reshape(-1)[:: max(1, value.size // 1000)].tobytes()
        return _ARRAY, about + value.tobytes()
    if len(value) * _BYTES_OF_ONE > most:
        if not isinstance(value, list):
            return "", b""
        form, sample = _content(value[:: len(value) // 1000], most)
        return (_SAMPLE if form else ""), sample + str(len(value)).encode()
    try:
        plain = list(value) if isinstance(value, deque) else value
        return _fitting(_PLAIN, marshal.dumps(plain, 2), most)  # 2: equal values have equal bytes
    except ValueError:
        pass
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, np.generic) for one in value):
        return _content(np.array(value), most)
    return "", b""


def _fitting(form: str, content: bytes, most: int) -> tuple[str, bytes]:
    return (form, content) if len(content) <= most else (_SAMPLE, content)


def _copy(form: str, content: bytes, value: Any) -> Any:
    if form == _PLAIN:
        return content
    return torch.from_numpy(_as_array(value).copy()) if form == _TENSOR else np.array(value)


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _most(owner: Any) -> int:
    return MOST_BYTES if is_order(owner) else _MOST_OF_DATASETS


def is_order(owner: Any) -> bool:
    """Whether it is iterated over and not asked by number: a sampler, a stream, a loader of the script's own."""
    kind = type(owner)
    return isinstance(owner, (Sampler, IterableDataset)) or (
        hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__") and not isinstance(owner, DataLoader)
    )


# What was first seen

_firsts: dict[int, tuple[weakref.ref[Any], dict[str, bytes]]] = {}


def _first(owner: Any) -> dict[str, bytes]:
    """Digests by the attribute's name, as they were first seen in this process."""
    key = id(owner)
    known = _firsts.get(key)
    if known is None or known[0]() is not owner:
        try:
            known = _firsts[key] = weakref.ref(owner, lambda _: _firsts.pop(key, None)), {}
        except TypeError:  # of a class with __slots__
            return {}
    return known[1]


_told: set[tuple[str, str]] = set()


def tell_too_large(owner: Any, name: str, most: int) -> None:
    """Say once that what has changed is kept by nobody."""
    key = type(owner).__name__, name
    if key not in _told:
        _told.add(key)
        log.warning(
            "%s.%s has changed since the loop began and holds more than %d MB: no checkpoint has it, and an attempt "
            "that goes on has other samples; draw a new order in each pass instead, as by torch.randperm",
            *key,
            most >> 20,
        )
