"""States as a tree: plain values in a skeleton of JSON, and tensors beside it. No pickle, except for foreign objects.

    state_dict() --flatten--> Tree(skeleton, leaves) --> shard --> rebuild(skeleton, leaves) --> load_state_dict()

A skeleton keeps the kinds of values and of keys: a dict of int keys comes back with int keys. leaves.py calls it.
"""

from __future__ import annotations

import base64
import collections
import math
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from jobkit.errors import CheckpointError

MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
}
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_FACTORIES = {factory.__name__: factory for factory in (list, dict, set, int, float, str)}


@dataclass(frozen=True)
class Tree:
    """A state in parts.

    tree = flatten({"step": 3, "weight": torch.ones(2)})
    tree.skeleton, list(tree.leaves)      # {"dict": [["step", 3], ["weight", {"tensor": "weight"}]]}, ["weight"]
    """

    skeleton: Any
    """JSON values."""
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors and numpy arrays, by their path; not copied."""
    pickled: list[str] = field(default_factory=list)
    """Paths of values that had to be pickled: only the owner's own file may be read back."""
    functions: dict[str, Any] = field(default_factory=dict)
    """Functions, as in a scheduler's state: they are not saved, the live ones stay."""


def flatten(state: Any) -> Tree:
    """Return a state of containers, tensors, arrays and plain values in parts. Raises CheckpointError for a value that
    cannot be pickled either."""
    tree = Tree(None)
    return Tree(_encode(state, "", tree), tree.leaves, tree.pickled, tree.functions)


def rebuild(
    skeleton: Any,
    leaves: Mapping[str, torch.Tensor],
    functions: Mapping[str, Any] | None = None,
    *,
    may_unpickle: bool,
) -> Any:
    """Return the state again, with the live `functions` in their places.

    Raises CheckpointError for a pickled value where `may_unpickle` is False.
    """
    return _Decoder(leaves, functions or {}, may_unpickle).decode(skeleton)


def _encode(value: Any, path: str, tree: Tree) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        place = {"order": order_of(value), "device": None if value.device.type == "cpu" else value.device.type}
        return {"tensor": _leaf(value.detach(), path, tree), **{key: item for key, item in place.items() if item}}
    if kind is np.ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
        return {"array": _leaf(_as_tensor(value), path, tree), "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"number": base64.b64encode(value.tobytes()).decode(), "dtype": value.dtype.str}
    if kind is list:
        return [_encode(item, _join(path, number), tree) for number, item in enumerate(value)]
    if kind.__name__ in SEQUENCES and kind in (tuple, set, frozenset, torch.Size):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value  # a set's order differs by process
        return {kind.__name__: [_encode(item, _join(path, number), tree) for number, item in enumerate(items)]}
    if kind in (dict, collections.OrderedDict, collections.Counter):
        return {kind.__name__: _items(value, path, tree)}
    if kind is collections.defaultdict and getattr(value.default_factory, "__name__", None) in _FACTORIES:
        return {"defaultdict": _items(value, path, tree), "factory": value.default_factory.__name__}
    if kind is collections.deque:
        items = [_encode(item, _join(path, number), tree) for number, item in enumerate(value)]
        return {"deque": items, "maxlen": value.maxlen}
    text = _plain_text(value)
    if text is not None:
        return text
    if kind in (types.FunctionType, types.MethodType, types.BuiltinFunctionType):
        tree.functions[path] = value
        return {"function": path}
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise CheckpointError(f"{path}: a {kind.__name__} cannot be saved ({error})") from error
    tree.pickled.append(path)
    return {"pickle": base64.b64encode(data).decode()}


def _plain_text(value: Any) -> dict[str, Any] | None:
    """Return the form of the plain kinds that JSON does not have; None for other kinds."""
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype_of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return None


def _items(value: Mapping[Any, Any], path: str, tree: Tree) -> list[Any]:
    return [
        [_encode(key, _join(path, f"key {number}"), tree), _encode(item, _join(path, key), tree)]
        for number, (key, item) in enumerate(value.items())
    ]


def _leaf(tensor: torch.Tensor, path: str, tree: Tree) -> str:
    name = path
    while name in tree.leaves:  # keys 1 and "1" of one dict
        name += "'"
    tree.leaves[name] = tensor
    return name


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions as memory has them, where that is another order than theirs, as in channels_last: fused
    optimizers take it that a parameter and its state lie alike."""
    if tensor.is_contiguous():
        return None
    order, step = sorted(range(tensor.dim()), key=tensor.stride, reverse=True), 1
    for dimension in reversed(order):
        if tensor.shape[dimension] != 1 and tensor.stride(dimension) != step:
            return None
        step *= tensor.shape[dimension]
    return order


def placed(leaf: torch.Tensor, order: list[int] | None = None, device: str | None = None) -> torch.Tensor:
    """Return a leaf on the device that it was saved from, if there is one here, its dimensions in this order."""
    present = torch.accelerator.current_accelerator(check_available=True) if device is not None else None
    if present is not None and present.type == device:
        leaf = leaf.to(present)
    if order is None:
        return leaf
    return leaf.permute(order).contiguous().permute([order.index(dimension) for dimension in range(leaf.dim())])


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array's bytes as a tensor: torch does not have all of numpy's dtypes."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())


@dataclass(frozen=True)
class _Decoder:
    leaves: Mapping[str, torch.Tensor]
    functions: Mapping[str, Any]
    may_unpickle: bool

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind, content = next(iter(value.items()))
        if kind == "tensor":
            return placed(self.leaves[content], **{key: item for key, item in value.items() if key != kind})
        if kind == "array":
            data = self.leaves[content].numpy().tobytes()
            return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
        if kind == "number":
            return np.frombuffer(base64.b64decode(content), dtype=value["dtype"])[0]
        if kind == "function":
            return self.functions.get(content)
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.decode(item) for item in content)
        if kind in MAPPINGS:
            return MAPPINGS[kind](self._pairs(content))
        if kind == "defaultdict":
            return collections.defaultdict(_FACTORIES[value["factory"]], self._pairs(content))
        if kind == "deque":
            return collections.deque(self.decode(content), value["maxlen"])
        if kind == "pickle":
            if not self.may_unpickle:
                raise CheckpointError("it holds a pickled value, and its file belongs to another user")
            return pickle.loads(base64.b64decode(content))
        return _PLAIN[kind](content)

    def _pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in items]


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "dtype_of": lambda name: getattr(torch, name),
    "device": torch.device,
}
