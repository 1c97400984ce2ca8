"""The trial of a stream's own state, in each attempt: a copy that gets it must give the sample that came next.

    checkpoint: state, digest of the next sample --> copy.load_state_dict --next--> the same digest?

Hugging Face's streams lose the samples of their shuffle buffers, once these have come around. foreign_loader.py and
streams.py call this, and read a stream that fails again up to its place instead.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._pytree import tree_leaves

from jobkit.data.seeds import preserved_generators
from jobkit.log import log

LARGE_BYTES = 2**20
"""Arrays of so many bytes are data and no place in them: the copy shares them. They may be files mapped to memory."""


def is_exact(stream: Any, following: Callable[[Any], Any], expected: str) -> bool:
    """Return whether `following(copy)`, which loads the state and returns the next sample, has the digest; say if not.

    A stream that cannot be copied is taken at its word. The generators of this process are left alone.
    """
    try:
        other = copied(stream)
    except Exception:  # as with an open file
        return True
    with preserved_generators():
        try:
            if digest(following(other)) == expected:
                return True
        except Exception:  # this attempt, and each that follows, would end with it
            pass
    log.warning(
        "the state_dict of %s does not bring its next sample back, as with a shuffle buffer: it is read again up to "
        "its place",
        type(stream).__name__,
    )
    return False


def has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def digest(sample: Any, *, whole: bool = True) -> str:
    """Return a digest of a sample; if not `whole`, of its tensors, arrays, texts and numbers alone."""
    total = xxhash.xxh3_64()
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            total.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            total.update(leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float)):
            total.update(repr(leaf).encode())
        elif whole:
            total.update(pickle.dumps(leaf))
    return total.hexdigest()


def copied(stream: Any) -> Any:
    """Return a copy that changes nothing of the stream's. Raises an error where there is none, as with open files."""
    shared: list[Any] = []
    file = io.BytesIO()
    _Pickler(file, shared).dump(stream)
    file.seek(0)
    return _Unpickler(file, shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            value = value if value.nbytes >= LARGE_BYTES else copy.deepcopy(value)
        elif not isinstance(value, (type, FunctionType, ModuleType)):
            if not hasattr(type(value), "__deepcopy__"):
                return None
            value = copy.deepcopy(value)  # as of a table that shares its columns with its copies
        self._shared.append(value)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]
