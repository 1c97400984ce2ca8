"""Optimizers that train what is tracked and are not tracked: an interrupted run would lose what they remember."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from jobkit.errors import UsageError
from jobkit.train.optimizer_state import Sharded, parameters_of
from jobkit.train.parallel import unwrapped


class SteppingOptimizers:
    """Sees which optimizers take steps in the loop, and looks once at each that does so in a second step of it.

    One that is made anew in each step has nothing that the next step needs.
    """

    def __init__(self, tracked: Callable[[], Collection[Any]]) -> None:
        self._tracked = tracked
        self.count = 0
        """Steps that optimizers have taken, tracked or not."""
        self._step = 0
        self._first: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The step of the loop in which each was seen first."""
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._new: list[torch.optim.Optimizer] = []
        """Those that are to be looked at, at the end of this step."""
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += 1
        if optimizer not in self._known and self._first.setdefault(optimizer, self._step) != self._step:
            self._known.add(optimizer)
            self._new.append(optimizer)

    def end_step(self) -> None:
        """A step of the loop is over. Raises UsageError for an optimizer whose state no tracked object would save."""
        self._step += 1
        if not self._new:
            return
        tracked = self._tracked()
        own = {id(one) for value in tracked for one in (value, _local(value))}
        new, self._new = [one for one in self._new if id(one) not in own], []
        modules = [unwrapped(value) for value in tracked if isinstance(value, nn.Module)]
        held = {id(parameter) for module in modules for parameter in module.parameters()}
        largest = {
            optimizer: max(tensors, key=Tensor.numel)
            for optimizer in new
            if any(id(parameter) in held for parameter in parameters_of(optimizer))
            and (tensors := list(_tensors(optimizer.state)))
        }
        saved = _Saved(tracked) if largest else None
        for optimizer, tensor in largest.items():
            if saved is not None and tensor not in saved:
                raise UsageError(_not_tracked(optimizer, tracked))

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizers train that have taken a step."""
        return [parameter for optimizer in self._first for parameter in parameters_of(optimizer)]

    def end(self) -> None:
        """Look no more."""
        self._handle.remove()


def _not_tracked(optimizer: torch.optim.Optimizer, tracked: Collection[Any]) -> str:
    found = (
        f"the {type(optimizer).__name__} that trains the tracked model is not tracked, so a run that is interrupted "
        "would lose its state: give it to ctx.epochs, or to ctx.track, before the loop"
    )
    if not any(isinstance(one, torch.optim.Optimizer) for one in tracked):
        return found
    return (
        f"{found}. Another is tracked: if this one is made within the loop, make it before, or change the param_groups "
        "of the one that is there"
    )


class _Saved:
    """What tracked objects save, to be asked whether a tensor is in it."""

    def __init__(self, tracked: Collection[Any]) -> None:
        self._storages: set[int] = set()
        self._alike: dict[tuple[Any, ...], list[Tensor]] = {}
        self._most_bytes = 0
        """Of what is saved as bytes, in which nobody can look."""
        self._states = [unwrapped(_local(value)).state_dict() for value in tracked]  # else a copy's address is reused
        modules = [unwrapped(value) for value in tracked if isinstance(value, nn.Module)]
        weights = {_storage(_part(one)) for module in modules for one in (*module.parameters(), *module.buffers())}
        for leaf in _leaves(self._states):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
                leaf = torch.from_numpy(np.array(leaf))
            if isinstance(leaf, (bytes, bytearray)):
                self._most_bytes = max(self._most_bytes, len(leaf))
            elif isinstance(leaf, Tensor) and _storage(part := _part(leaf)) not in weights:
                self._storages.add(_storage(part))
                self._alike.setdefault(_kind(part), []).append(part)
                if part.dtype == torch.uint8:
                    self._most_bytes = max(self._most_bytes, part.numel())

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether the tensor itself or a copy of it is saved; in doubt it is."""
        part = _part(tensor)
        if _storage(part) in self._storages or part.numel() * part.element_size() <= self._most_bytes:
            return True
        return any(torch.equal(part, one.to(part.device)) for one in self._alike.get(_kind(part), ()))


def _local(value: Any) -> Any:
    """Of an optimizer that is shared out over the ranks, this rank's: the other is saved by all of them together."""
    return value.optim if isinstance(value, Sharded) else value


def _part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape


def _tensors(state: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves([state]) if isinstance(leaf, Tensor) and leaf.numel())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What stands at the ends of dicts, lists and tuples, each of these looked into once."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, (dict, list, tuple)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
