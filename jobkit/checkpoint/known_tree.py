"""A state that was flattened before: where its form is seen to be the same it is not named and pickled again."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from jobkit.checkpoint.state import flatten

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
"""Of which the value is all there is: no subclasses, and nothing that can be changed in place."""

_DENSE = frozenset((torch.Tensor, torch.nn.Parameter))
"""DTensors take Python for each attribute: a tree that has some is flattened each time."""


@dataclass
class _Described:
    """What decides how tensors are copied, and what a skeleton says of them."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    parameters: list[tuple[int, bool]]
    """The positions of those that are Parameters, and whether they require a gradient: of others it is not kept."""

    def __post_init__(self) -> None:
        self._on_cpu = all(device.type == "cpu" for device in self.devices)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Described | None:
        """None where there are others than dense."""
        if not set(map(type, tensors)) <= _DENSE:
            return None
        return cls(
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
            [(n, tensor.requires_grad) for n, tensor in enumerate(tensors) if type(tensor) is torch.nn.Parameter],
        )

    def permuted(self, order: Sequence[int]) -> _Described:
        at = {number: position for position, number in enumerate(order)}
        return _Described(
            [self.shapes[number] for number in order],
            [self.dtypes[number] for number in order],
            [self.devices[number] for number in order],
            [(at[number], requires_grad) for number, requires_grad in self.parameters],
        )

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors, of the same classes, are described by this. One pass: each is far from the cache."""
        strided = torch.strided
        for tensor, shape, dtype in zip(tensors, self.shapes, self.dtypes, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.layout is not strided:
                return False
            if self._on_cpu and not tensor.is_cpu:
                return False
        if not self._on_cpu and [tensor.device for tensor in tensors] != self.devices:
            return False
        return all(tensors[position].requires_grad is grad for position, grad in self.parameters)


@dataclass(frozen=True)
class Flat:
    """What `flatten` gives of a tree; `skeleton` is asked for when the tree may have changed already."""

    names: Sequence[str]
    tensors: list[torch.Tensor]
    """Those of the tree itself, in the order of the names."""
    skeleton: Callable[[], bytes]
    form: object
    """The same object for as long as names, shapes, dtypes and devices are the same."""


class KnownTree:
    """One tree of the saves of a run. The skeleton of a save is that of the tree until the next `flatten`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._described: _Described | None = None
        self._form = object()
        self._known: _Form | None = None
        self._may_know = True
        """Whether it is worth a look: not of a tree that changes from save to save."""

    def flatten(self, tree: Any) -> Flat:
        known, self._known = self._known, None
        if known is not None and (tensors := known.tensors_of(tree)) is not None:
            self._known = known
            return Flat(self._names, tensors, known.skeleton, self._form)
        skeleton, found = flatten(tree)
        names, tensors = list(found), list(found.values())
        described = _Described.of(tensors)
        if described is None or names != self._names or described != self._described:
            self._names, self._described, self._form = names, described, object()
            self._may_know = described is not None
        elif self._may_know and (known is None or known.was_seen):
            self._known = _form_of(tree, found, skeleton, described)
            self._may_know = self._known is not None
        else:
            self._may_know = False
        return Flat(names, tensors, lambda: skeleton, self._form)


class _NotPlain(Exception):
    """A tree of which more than types, keys and plain values would have to be compared."""


@dataclass(frozen=True)
class _Reference:
    """Stands for a tensor where a tree is pickled later."""

    to: tuple[str, bool, bool]


@dataclass
class _Node:
    """A dict, list or tuple of a tree."""

    kind: type
    keys: tuple[Any, ...]
    key_types: tuple[type, ...]
    types: tuple[type, ...]
    copy: Any
    """One of its own, with references in the place of tensors."""
    tensors: list[int] = field(default_factory=list)
    """Positions."""
    plain: list[int] = field(default_factory=list)
    plain_data: bytes = b""
    children: list[tuple[int, _Node]] = field(default_factory=list)
    attributes: _Node | None = None
    """Of an OrderedDict: a module's state_dict has its versions there."""


class _Form:
    """A tree of which all that is no tensor is known, without one object at two places."""

    def __init__(self, root: _Node, order: list[int] | None, objects: int, described: _Described, skeleton: bytes):
        self.was_seen = False
        """Whether it was that of a later tree, too."""
        self._root, self._objects, self._described = root, objects, described
        self._in_order = None if order is None else itemgetter(*order)
        self._skeleton: bytes | None = skeleton

    def skeleton(self) -> bytes:
        """Of the tree that was seen last."""
        if self._skeleton is None:
            buffer = io.BytesIO()
            _Pickler(buffer, protocol=4).dump(self._root.copy)
            self._skeleton = buffer.getvalue()
        return self._skeleton

    def tensors_of(self, tree: Any) -> list[torch.Tensor] | None:
        """The tensors of a tree of this form; None for any other."""
        found = _Found()
        try:
            if type(tree) is not self._root.kind or not found.walk(self._root, tree):
                return None
            tensors = found.tensors
            if len({*map(id, tensors), *found.containers}) != self._objects:
                return None  # one of them is at two places now
            if not self._described.fits(tensors):
                return None
        except Exception:  # whatever it is, `flatten` meets it
            return None
        for node, values, data in found.changed:
            for position, value in values:
                node.copy[node.keys[position] if node.keys else position] = value
            node.plain_data, self._skeleton = data, None
        self.was_seen = True
        return tensors if self._in_order is None else list(self._in_order(tensors))


class _Found:
    """What a walk along a known tree meets."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.containers: list[int] = []
        self.changed: list[tuple[_Node, list[tuple[int, Any]], bytes]] = []

    def walk(self, node: _Node, live: Any) -> bool:
        """Whether a container of the same type has the form of this node."""
        self.containers.append(id(live))
        if isinstance(live, dict):
            if tuple(map(type, live)) != node.key_types or tuple(live) != node.keys:
                return False
            values = tuple(live.values())
        else:
            values = tuple(live)
        if tuple(map(type, values)) != node.types:
            return False
        if len(node.tensors) == len(values):
            self.tensors.extend(values)
        else:
            self.tensors.extend([values[position] for position in node.tensors])
            if node.plain and not self._compare(node, [values[position] for position in node.plain]):
                return False
        if node.kind is OrderedDict:
            attributes = live.__dict__
            if (node.attributes is None) != (not attributes):
                return False
            if node.attributes is not None and not self.walk(node.attributes, attributes):
                return False
        return all(self.walk(child, values[position]) for position, child in node.children)

    def _compare(self, node: _Node, values: list[Any]) -> bool:
        data = pickle.dumps(values)  # tells 0.0 from -0.0
        if data == node.plain_data:
            return True
        if node.kind is tuple or not all(map(_is_plain, values)):
            return False
        self.changed.append((node, list(zip(node.plain, values, strict=True)), data))
        return True


def _is_plain(value: Any) -> bool:
    """A value, or a tuple of such, as an optimizer's betas, of which it does not matter at how many places it is."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, bool, bool] | None:
        return value.to if type(value) is _Reference else None


def _form_of(tree: Any, found: dict[str, torch.Tensor], skeleton: bytes, described: _Described) -> _Form | None:
    """That of a tree of which `found` are all tensors; None where it is not of plain containers and values."""
    builder = _Builder(found)
    try:
        root = builder.node(tree)
    except _NotPlain:
        return None
    if len(builder.tensors) != len(found):
        return None
    places = {name: place for place, name in enumerate(builder.tensors)}
    order = [places[name] for name in found]
    is_sorted = order == list(range(len(order)))
    as_found = {name: number for number, name in enumerate(found)}
    described = described.permuted([as_found[name] for name in builder.tensors])
    return _Form(root, None if is_sorted else order, len(builder.seen), described, skeleton)


class _Builder:
    def __init__(self, found: dict[str, torch.Tensor]) -> None:
        self._names = {id(tensor): name for name, tensor in found.items()}
        self.tensors: list[str] = []
        """Names, in the order in which `_Found.walk` meets them."""
        self.seen: set[int] = set()

    def node(self, live: Any, copy: Any = None) -> _Node:
        """Raises _NotPlain. Into `copy`, where that is given."""
        kind = type(live)
        if kind not in (dict, OrderedDict, list, tuple):
            raise _NotPlain
        self._see(live)
        keys = tuple(live) if kind in (dict, OrderedDict) else ()
        values = tuple(live.values()) if kind in (dict, OrderedDict) else tuple(live)
        if not set(map(type, keys)) <= {str, int}:
            raise _NotPlain
        node = _Node(kind, keys, tuple(map(type, keys)), tuple(map(type, values)), copy)
        parts: list[Any] = list(values)
        for position, value in enumerate(values):
            if type(value) in _DENSE:
                parts[position] = self._reference(value)
                node.tensors.append(position)
            elif _is_plain(value):
                node.plain.append(position)
        node.plain_data = pickle.dumps([values[position] for position in node.plain])
        own = {*node.tensors, *node.plain}
        attributes = live.__dict__ if kind is OrderedDict else {}
        holder: OrderedDict[Any, Any] = OrderedDict()
        if attributes:
            node.attributes = self.node(attributes, holder.__dict__)
        for position in range(len(values)):
            if position not in own:
                child = self.node(values[position])
                node.children.append((position, child))
                parts[position] = child.copy
        if kind is tuple or kind is list:
            node.copy = kind(parts)
        else:
            node.copy = holder if kind is OrderedDict else {} if copy is None else copy
            node.copy.update(zip(keys, parts, strict=True))
        return node

    def _reference(self, tensor: torch.Tensor) -> _Reference:
        self._see(tensor)
        name = self._names.get(id(tensor))
        if name is None:
            raise _NotPlain  # sparse: it is pickled as it is
        self.tensors.append(name)
        return _Reference((name, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad))

    def _see(self, value: Any) -> None:
        if id(value) in self.seen:
            raise _NotPlain  # one object at two places
        self.seen.add(id(value))
