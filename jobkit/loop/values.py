"""ctx.values and jobkit.attributes: plain values, tensors and arrays of a script, as its best score, in the checkpoint.

A script may hold a list, an array or a tensor by another name: a restore fills the object that is there. context.py and
tracked.py call it.
"""

from __future__ import annotations

import copy
import json
import types
from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from jobkit.checkpoint.tree import flatten
from jobkit.errors import UsageError, nearest


class Values:
    """Values by name, as attributes: `state = ctx.values(best=0.0, x=x)`; `state.best = 1.0`.

    Numbers, texts, None, tensors, arrays, and lists, dicts, sets and deques of these are kept as they are given. Each
    rank has its own.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():  # a list or mapping of ctx.params is one of OmegaConf's
            vars(self)[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint, in the objects that the script may hold."""
        filled: dict[int, Any] = {}
        for name, value in state.items():
            vars(self)[name] = _placed(vars(self).get(name), value, filled)


def _placed(held: Any, value: Any, filled: dict[int, Any]) -> Any:
    """Return a value of a checkpoint for one place, in the object that the script holds there, where it may be.

    A script may have put one object at several places, as `[x] * 3`, and others there since. `filled` has the objects
    that this restore has filled, by id: a place whose value is another one gets an object of its own.
    """
    if id(held) in filled:
        return held if _is_equal(held, value) else copy.deepcopy(value)
    taken = _taken(held, value, filled)
    if taken is held:
        filled[id(held)] = held
    return taken


def _taken(held: Any, value: Any, filled: dict[int, Any]) -> Any:
    """Return a value of a checkpoint, in the object that the script holds, where that is of its form."""
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and _form(held) == _form(value):
        with torch.inference_mode(held.is_inference()), torch.no_grad():  # pseudo-labels may be made in that mode
            return held.copy_(value)
    if isinstance(held, np.ndarray) and isinstance(value, np.ndarray) and _is_alike(held, value):
        np.copyto(held, value)
        return held
    if isinstance(held, dict) and isinstance(value, dict):
        items = {key: _placed(held.get(key), item, filled) for key, item in value.items()}
        held.clear()
        held.update(items)
        return held
    if isinstance(held, list) and isinstance(value, list):
        held[:] = [_placed(item, new, filled) for item, new in zip_longest(held, value)][: len(value)]
        return held
    if isinstance(held, set) and isinstance(value, set):
        held.clear()
        held.update(value)
        return held
    if isinstance(held, deque) and isinstance(value, deque) and held.maxlen == value.maxlen:
        taken = [_placed(item, new, filled) for item, new in zip_longest(held, value)][: len(value)]
        held.clear()
        held.extend(taken)
        return held
    if isinstance(held, bytearray) and isinstance(value, (bytes, bytearray)):
        held[:] = value
        return held
    return copy.deepcopy(value)


def _is_equal(held: Any, value: Any) -> bool:
    """Return whether two values have the same bits, which NaN has too."""
    ours, theirs = flatten(held), flatten(value)
    return json.dumps(ours.skeleton) == json.dumps(theirs.skeleton) and all(
        leaf.dtype == theirs.leaves[path].dtype
        and leaf.shape == theirs.leaves[path].shape
        and torch.equal(_bits(leaf), _bits(theirs.leaves[path]))
        for path, leaf in ours.leaves.items()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _is_alike(held: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return held.dtype == value.dtype and held.shape == value.shape and held.flags.writeable


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class Attributes:
    """The attributes of an object that has no state_dict, as ctx.track takes them: `jobkit.attributes`."""

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        self._value, self._names = value, names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._value, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        filled: dict[int, Any] = {}
        for name in self._names:
            if name in state:  # the code may name more than when the run began
                setattr(self._value, name, _placed(getattr(self._value, name, None), state[name], filled))


def attributes(value: Any, *names: str) -> Attributes:
    """Return state for ctx.track, made of some attributes of an object that has no state_dict.

    ctx.track(env=jobkit.attributes(env, "position", "score"), rng=jobkit.attributes(rng.bit_generator, "state"))

    The attributes are plain values, tensors and arrays, and lists, dicts, sets and deques of these. Raises UsageError
    for a name that the object does not have, and for a value that is none of these.
    """
    kind = type(value).__name__
    if not names:
        raise UsageError(f"jobkit.attributes: name the attributes, as jobkit.attributes({kind.lower()}, 'a', 'b')")
    for name in names:
        if not hasattr(value, name):
            hint = nearest(name, [item for item in dir(value) if not item.startswith("_")])
            raise UsageError(f"jobkit.attributes: a {kind} has no attribute {name!r}{f': {hint}' if hint else ''}")
    if replaced := replaced_by_restores({name: getattr(value, name) for name in names}):
        path, inner = replaced
        raise UsageError(
            f"jobkit.attributes: {path} of a {kind} is a {inner}, which a restore would replace: track that too, by "
            "ctx.track(name=...) or jobkit.attributes(...)"
        )
    return Attributes(value, names)


_KEPT = (torch.Tensor, np.ndarray, bytearray, torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_NO_HASH: tuple[Any, ...] = (None, object.__hash__)
_CONTAINERS = (list, tuple, set, frozenset, deque)


def replaced_by_restores(values: Any, path: str = "") -> tuple[str, str] | None:
    """Return the path and the type of the first object that changes in place and that a restore cannot fill.

    A type whose values are equal by content has a hash of its own, as a path, a date or a frozen dataclass.
    """
    if isinstance(values, _KEPT):
        return None
    if isinstance(values, Mapping):
        for key in values:
            if (
                isinstance(key, torch.Tensor) or type(key).__hash__ in _NO_HASH
            ):  # no key of the next process is this one
                return path, f"{type(values).__name__} with a key that is a {type(key).__name__}"
        items = values.items()
    elif isinstance(values, _CONTAINERS):
        items = dict(enumerate(values)).items()
    elif values is None or isinstance(values, type) or type(values).__hash__ not in _NO_HASH:
        return None
    else:
        return path, type(values).__name__
    replaced = (replaced_by_restores(item, f"{path}/{key}" if path else str(key)) for key, item in items)
    return next((item for item in replaced if item is not None), None)
