"""The live tensors of what a run tracks. They are looked up once, and known by identity from then on.

    Entry(model)     --leaves--> parameters and buffers themselves     read and written in place
    Entry(optimizer) --leaves--> the state's tensors, by the names of the parameters
    Entry(other)     --leaves--> the tensors in its state_dict()       read by load_state_dict()

A walk by state_dict() over 10,000 tensors takes 25 ms, and their copy 13 ms; to see that they are the same as at the
last save takes one. staging.py and reading.py call this; it moves no data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from jobkit.checkpoint.tree import Tree, flatten, order_of, placed, rebuild
from jobkit.errors import CheckpointError

KERNELS = ("foreach", "fused", "capturable")
"""Options of an optimizer's group that choose its kernels, as the device and the code have them now."""

Scope = Literal["shared", "rank"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A named part of a run's state on this rank.

    Entry(name="model", live=model)
    Entry(name="values", live=values, scope="rank")
    """

    name: str
    live: Any
    """It has state_dict() and load_state_dict()."""
    scope: Scope = "shared"
    """`shared`: all ranks have it together, as copies or as parts. `rank`: each rank has one of its own."""
    rank_keys: Collection[str] = ()
    """Leaves of a shared entry that each rank has for itself all the same, as buffers that DDP does not broadcast."""
    frozen: set[str] = field(default_factory=set)
    """Parameters that no checkpoint holds until they are trained."""
    optional: bool = False
    """True if a checkpoint may lack it."""


@dataclass
class Leaves:
    """The leaves of an entry, and its plain values."""

    tensors: dict[str, torch.Tensor]
    skeleton: Any
    pickled: list[str] = field(default_factory=list)
    left_out: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Frozen parameters, which no checkpoint holds."""


class LeafFinder:
    """Finds the leaves of one entry, again and again.

    finder = finder_of(Entry(name="model", live=model), {})
    finder.find().tensors["0.weight"] is model[0].weight      # True
    """

    version = 0
    """Counts the looks that had other leaves than the look before."""
    keeps_leaves = True
    """False if each look may find other tensors, as gradients: nobody holds them longer than their copy takes."""

    def find(self) -> Leaves:
        """Return the leaves as they are now."""
        raise NotImplementedError

    def adopt(self, skeleton: Any, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Leaves:
        """Return leaves to read a checkpoint into: the live ones, made where they do not exist yet."""
        raise NotImplementedError

    def finish(self, skeleton: Any, leaves: Mapping[str, torch.Tensor], *, may_unpickle: bool) -> None:
        """Give the object its plain values, once the leaves are read."""
        raise NotImplementedError


def finder_of(entry: Entry, names: Mapping[int, str]) -> LeafFinder:
    """Return the finder for an entry. `names` has the names of parameters, by id."""
    live = plain_module(entry.live)
    if isinstance(live, Optimizer) and hasattr(live, "local_optimizer"):
        return _OptimizerFinder(live.local_optimizer, names, live)
    if isinstance(live, nn.Module) and type(live).state_dict is nn.Module.state_dict:
        return _ModuleFinder(live, entry.frozen)
    is_plain = isinstance(live, Optimizer) and type(live).state_dict is Optimizer.state_dict
    if is_plain and (type(live).load_state_dict is Optimizer.load_state_dict or hasattr(live, "has_plain_state")):
        return _OptimizerFinder(live, names)
    return _StateFinder(entry.name, live)


def plain_module(value: Any) -> Any:
    """Return the module within DDP's, torch.compile's and a pipeline's; any other value as it is."""
    while isinstance(value, nn.Module):
        inner = getattr(value, "_orig_mod", None) or getattr(value, "own_stage", None)
        if inner is None and isinstance(value, nn.parallel.DistributedDataParallel):
            inner = value.module
        if inner is None:
            break
        value = inner
    return value


class _Slots:
    """Places in dicts, what lies there, and where tensors have their memory: a look at them takes 0.1 us each.

    `parameter.data = ...` leaves the tensor, and gives it other memory.
    """

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._holders: list[dict[Any, Any]] = []
        self._sizes: list[int] = []

    def watch(self, *holders: dict[Any, Any]) -> None:
        """Take note of a dict, whose growth would be a change."""
        self._holders += holders
        self._sizes += map(len, holders)

    def add(self, holder: dict[Any, Any], key: Any) -> None:
        """Take note of a tensor, or of an object on the way to it, which may be replaced."""
        self.dicts.append(holder)
        self.keys.append(key)
        self.values.append(value := holder[key])
        if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
            self._tensors.append(value)
            self._pointers.append(value.data_ptr())

    def are_same(self) -> bool:
        if list(map(len, self._holders)) != self._sizes:
            return False
        try:
            same = all(map(is_, map(dict.__getitem__, self.dicts, self.keys), self.values))
            return same and list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers
        except KeyError:
            return False


class _ModuleFinder(LeafFinder):
    """Parameters, persistent buffers and extra states of a module, as its state_dict() names them."""

    def __init__(self, module: nn.Module, frozen: set[str]) -> None:
        self.module, self._frozen = module, frozen
        self._left_out: dict[str, torch.Tensor] = {}
        self._slots: _Slots | None = None
        self._live = Leaves({}, None)
        self._extra: dict[str, nn.Module] = {}

    def find(self) -> Leaves:
        thawed = any(parameter.requires_grad for parameter in self._left_out.values())
        if thawed or self._slots is None or not self._slots.are_same():
            self._walk()
            self.version += 1
        skeleton, leaves, pickled = None, self._live.tensors, []
        if self._extra:
            tree = flatten({name: module.get_extra_state() for name, module in self._extra.items()})
            skeleton, pickled = tree.skeleton, tree.pickled
            leaves = {**leaves, **{f"extra/{path}": leaf for path, leaf in tree.leaves.items()}}
            self.version += bool(tree.leaves)
        return Leaves(leaves, skeleton, pickled, self._left_out)

    def _walk(self) -> None:
        slots, leaves, seen = _Slots(), {}, set()
        self._extra, self._left_out = {}, {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            parameters, buffers = module._parameters, module._buffers
            slots.watch(parameters, buffers, module._modules)
            for child in module._modules:
                slots.add(module._modules, child)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._extra[prefix] = module
            for holder, skipped in ((parameters, ()), (buffers, module._non_persistent_buffers_set)):
                for key, tensor in holder.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if key in skipped:
                        continue
                    slots.add(holder, key)
                    if tensor is None:
                        continue
                    if name in self._frozen and not tensor.requires_grad:
                        self._left_out[name] = tensor
                        continue
                    self._frozen.discard(name)  # it has been trained, also if it is frozen again
                    if id(tensor) not in seen:  # tied weights are saved once
                        seen.add(id(tensor))
                        leaves[name] = tensor
        self._slots, self._live = slots, Leaves(leaves, None)

    def adopt(self, skeleton: Any, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Leaves:
        self._frozen.difference_update(shapes)
        self._make_buffers(shapes)
        self._slots = None
        live = self.find()
        extra = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items() if _is_extra(name)}
        return Leaves({**{name: leaf for name, leaf in live.tensors.items() if not _is_extra(name)}, **extra}, None)

    def _make_buffers(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Make the buffers that training makes or lets grow: a memory bank, an average that begins as None."""
        modules = dict(self.module.named_modules())
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        for path, (dtype, shape) in shapes.items():
            prefix, _, key = path.rpartition(".")
            buffers = modules[prefix]._buffers if prefix in modules else {}
            if key in buffers and ((buffer := buffers[key]) is None or (buffer.dtype, buffer.shape) != (dtype, shape)):
                buffers[key] = torch.empty(shape, dtype=dtype, device=None if first is None else first.device)

    def finish(self, skeleton: Any, leaves: Mapping[str, torch.Tensor], *, may_unpickle: bool) -> None:
        if skeleton is None:
            return
        extra = {name.removeprefix("extra/"): leaf for name, leaf in leaves.items() if _is_extra(name)}
        for name, state in rebuild(skeleton, extra, may_unpickle=may_unpickle).items():
            if name in self._extra:
                self._extra[name].set_extra_state(state)


def _is_extra(name: str) -> bool:
    return name.startswith("extra/")


class _OptimizerFinder(LeafFinder):
    """The state of a torch optimizer: `state/<parameter>/<key>`, its other state, and the options of its groups."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], outer: Optimizer | None = None) -> None:
        self.optimizer, self._names = optimizer, names
        self._outer = outer or optimizer
        """The optimizer whose options a schedule changes: zero1's, which gives them to its local one."""
        self._slots: _Slots | None = None
        self._leaves: dict[str, torch.Tensor] = {}
        self._orders: dict[str, list[int]] = {}
        """How tensors lie in memory, where that is not as usual."""
        self._plain: list[tuple[str, dict[Any, Any], Any]] = []
        """Values of the state that are no tensors."""

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [(self._names.get(id(item), f"parameter {number}"), item) for number, item in enumerate(parameters)]

    def find(self) -> Leaves:
        is_known = not any(isinstance(holder[key], torch.Tensor) for _, holder, key in self._plain)
        if self._slots is None or not self._slots.are_same() or not is_known:
            self._walk()
            self.version += 1
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._outer.param_groups]
        state = self.optimizer.state
        tree = flatten(
            {
                "groups": groups,
                "orders": self._orders,
                "state": {path: holder[key] for path, holder, key in sorted(self._plain, key=itemgetter(0))},
                "other": {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
            }
        )
        self.version += bool(tree.leaves)
        leaves = {**self._leaves, **{f"options/{path}": leaf for path, leaf in tree.leaves.items()}}
        return Leaves(leaves if tree.leaves else self._leaves, tree.skeleton, tree.pickled)

    def _walk(self) -> None:
        slots, leaves, orders, plain = _Slots(), {}, {}, []
        slots.watch(self.optimizer.state)
        slots.add(vars(self.optimizer), "state")
        for name, parameter in self._named():
            if parameter not in self.optimizer.state:
                continue
            slots.add(self.optimizer.state, parameter)
            state = self.optimizer.state[parameter]
            slots.watch(state)
            for key, value in state.items():
                path = f"state/{name}/{key}"
                if not isinstance(value, torch.Tensor):
                    plain.append((path, state, key))
                    continue
                slots.add(state, key)
                leaves[path] = value
                if (order := order_of(value)) is not None:
                    orders[path] = order
        self._slots, self._leaves, self._orders, self._plain = slots, leaves, dict(sorted(orders.items())), plain

    def adopt(self, skeleton: Any, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Leaves:
        """Make the state that the checkpoint has: before the first step an optimizer has none."""
        parameters = dict(self._named())
        leaves: dict[str, torch.Tensor] = {}
        for path, (dtype, shape) in shapes.items():
            if path.startswith("options/"):
                leaves[path] = torch.empty(shape, dtype=dtype)
                continue
            name, _, key = path.removeprefix("state/").rpartition("/")
            parameter = parameters.get(name)
            if parameter is None:  # another rank's, or no longer a parameter: the reader compares all ranks
                continue
            state = self.optimizer.state[parameter]
            if not isinstance(state.get(key), torch.Tensor) or state[key].shape != shape or state[key].dtype != dtype:
                state[key] = self._made_like(parameter, key, dtype, shape)
            leaves[path] = state[key]
        self._slots = None
        return Leaves(leaves, None)

    def _made_like(self, parameter: torch.Tensor, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an empty tensor on the device where torch's own load_state_dict would put this one."""
        if key == "step":
            group = next(
                group for group in self.optimizer.param_groups if any(member is parameter for member in group["params"])
            )
            on_device = group.get("capturable") or group.get("fused")
            return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        if tuple(parameter.shape) == tuple(shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # also a part of a sharded one
        return torch.empty(shape, dtype=dtype, device=parameter.device)

    def finish(self, skeleton: Any, leaves: Mapping[str, torch.Tensor], *, may_unpickle: bool) -> None:
        options = {path.removeprefix("options/"): leaf for path, leaf in leaves.items() if path.startswith("options/")}
        values = rebuild(skeleton, options, may_unpickle=may_unpickle)
        parameters = dict(self._named())
        orders = {
            path: placed(leaves[path], order)
            for path, order in values["orders"].items()
            if path in leaves and order_of(leaves[path]) != order
        }
        for path, value in [*values["state"].items(), *orders.items()]:
            name, _, key = path.removeprefix("state/").rpartition("/")
            if name in parameters:  # on other ranks than before another stage may have it
                self.optimizer.state[parameters[name]][key] = value
        self.optimizer.state.update(values["other"])
        groups = self._outer.param_groups
        if len(values["groups"]) != len(groups):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(values['groups'])} groups of parameters, this one {len(groups)}"
            )
        for group, saved in zip(groups, values["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in KERNELS})


class _StateFinder(LeafFinder):
    """Anything else with state_dict() and load_state_dict(): a scheduler, a loader, values."""

    keeps_leaves = False

    def __init__(self, name: str, live: Any) -> None:
        self.name, self.live = name, live
        self._paths: list[str] | None = None

    def find(self) -> Leaves:
        tree = self._tree()
        paths = [f"{path} {leaf.dtype} {tuple(leaf.shape)} {leaf.device}" for path, leaf in tree.leaves.items()]
        self.version += paths != self._paths or bool(paths)
        self._paths = paths
        return Leaves(tree.leaves, tree.skeleton, tree.pickled)

    def _tree(self) -> Tree:
        try:
            return flatten(self.live.state_dict())
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from error

    def adopt(self, skeleton: Any, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Leaves:
        return Leaves({path: torch.empty(shape, dtype=dtype) for path, (dtype, shape) in shapes.items()}, None)

    def finish(self, skeleton: Any, leaves: Mapping[str, torch.Tensor], *, may_unpickle: bool) -> None:
        functions = self._tree().functions
        self.live.load_state_dict(rebuild(skeleton, leaves, functions, may_unpickle=may_unpickle))


def names_of(modules: Sequence[tuple[str, nn.Module]]) -> dict[int, str]:
    """Return the name of each parameter of tracked modules, by id: `model/0.weight`."""
    return {
        id(parameter): f"{name}/{key}"
        for name, module in modules
        for key, parameter in plain_module(module).named_parameters()
    }
