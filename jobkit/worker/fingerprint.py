"""Whether a step has changed anything that a checkpoint would hold: in the middle of one, none is taken."""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from jobkit.checkpoint.state import device_rng_states, named_tensors
from jobkit.checkpoint.summary import digest, summarise, windows
from jobkit.train.fields import assigned_names
from jobkit.train.optimizer_state import Sharded
from jobkit.train.parallel import unwrapped

_FREE_SECONDS = 0.05
"""What the fingerprints of an attempt may cost in any case."""

_SHARE, _SHARE_WHERE_EXPECTED = 0.002, 0.02
"""Of the time since, what they may cost; and those of steps at which an evaluation is expected."""

_LOOKED_AT = 16
"""Parameters of each module of which some elements are looked at."""

_WHOLE = 1 << 20
"""Elements up to which a tensor of other objects is looked at whole; of a larger one torch's count is taken too."""


class Fingerprint:
    """What a checkpoint would hold, at one moment; equal to a later one as long as nothing of it was changed."""

    def __init__(self, parts: tuple[Any, ...], elements: list[Tensor]) -> None:
        self._parts, self._elements = parts, elements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self._parts != other._parts:
            return False
        return all(torch.equal(a, b) for a, b in zip(self._elements, other._elements, strict=True))

    __hash__ = None  # type: ignore[assignment]


class StateWatch:
    """Takes fingerprints of tracked objects.

    A tensor is known to be the same by its address and the number of changes that torch counts for it. Changes through
    `.data` are not counted: so some elements of some parameters are kept as well, on their device, for which nobody
    waits. Of an optimizer also its steps are counted. Everything else is known by a digest of its state_dict.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._generators = _Generators(devices)
        self._since: float | None = None
        self._spent = 0.0
        self._modules: list[_Module] = []
        self._optimizers: list[_Optimizer] = []
        self._others: list[Any] = []

    def track(self, objects: Iterable[Any]) -> None:
        """Whose fingerprints are taken from here on."""
        for value in map(unwrapped, objects):
            if isinstance(value, nn.Module):
                self._modules.append(_Module(value))
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers.append(_Optimizer(value))
            else:
                self._others.append(value)

    def take_if_cheap(self, *, evaluation_expected: bool) -> Fingerprint | None:
        """A fingerprint, unless those taken here have cost too much of the time since the first."""
        now = time.perf_counter()
        self._since = self._since or now
        share = _SHARE_WHERE_EXPECTED if evaluation_expected else _SHARE
        if self._spent > _FREE_SECONDS + share * (now - self._since):
            return None
        found = self.take()
        self._spent += time.perf_counter() - now
        return found

    def take(self) -> Fingerprint:
        watched = [one.parts() for one in self._modules], [one.parts() for one in self._optimizers]
        digests = [_digest(value.state_dict()) for value in self._others]
        elements = [one for module in self._modules for one in module.elements()]
        return Fingerprint((self._generators.states(), watched, digests), elements)


def _digest(tree: Any) -> Any:
    large = [one for one in named_tensors(tree).values() if one.numel() > _WHOLE]
    return digest(summarise(tree, whole_up_to=_WHOLE)), _Tensors(large).versions()


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """What an evaluation may change of a module's attributes: counts, and lists and tensors by their identity."""
    own = _own_names(part)
    return [
        (name, value if type(value) in _SCALARS else (id(value), _size(value)))
        for name, value in vars(part).items()
        if (name in own or name[:1] != "_") and name != "training"
    ]


def _own_names(part: nn.Module) -> frozenset[str]:
    cls: Any = type(part)
    return assigned_names(cls)


_SCALARS = frozenset((bool, int, float, str, type(None)))


def _size(value: Any) -> int:
    """By which most changes in place are seen."""
    if type(value) is Tensor:
        return 0 if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, dict, set, deque)) else 0


class _Module:
    """A module, and what it consists of at the moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        # Between forwards fully_shard puts whole parameters in the place of shards, which are what counts.
        self._is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        self._tensors = _Tensors([*self._parameters, *module.buffers()])
        plain = nn.Module.get_extra_state
        self._with_extra = [part for part in module.modules() if type(part).get_extra_state is not plain]
        self._of_script = [part for part in module.modules() if _own_names(part)]
        distance = -(-len(self._parameters) // _LOOKED_AT) or 1
        made = [one for one in map(_local, self._parameters[::distance]) if not is_lazy(one)]
        self._looked_at = [one for one in made if one.numel() and not one.is_meta]
        self._addresses: list[int] = []
        self._views: list[list[Tensor]] = []

    def parts(self) -> Any:
        if not self._is_sharded:
            self._tensors = _Tensors([*self._module.parameters(), *self._module.buffers()])
        gradients = [parameter.grad for parameter in self._parameters]
        return (
            self._tensors.versions(),
            [None if one is None else (id(one), one._version) for one in gradients],
            [_digest(part.get_extra_state()) for part in self._with_extra],
            [_attributes(part) for part in self._of_script],
        )

    def elements(self) -> list[Tensor]:
        """Copies of some elements, for each device."""
        addresses = [one.data_ptr() for one in self._looked_at]
        if addresses != self._addresses:
            found: dict[torch.device, list[Tensor]] = {}
            for one in self._looked_at:
                found.setdefault(one.device, []).extend(windows(one))
            self._addresses, self._views = addresses, list(found.values())
        return [torch.cat(views) for views in self._views]


class _Optimizer:
    """An optimizer, its options and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = optimizer.optim if isinstance(optimizer, Sharded) else optimizer
        self._steps = 0
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def parts(self) -> Any:
        options = [value for group in self._optimizer.param_groups for key, value in group.items() if key != "params"]
        found = [one for state in self._own.state.values() for one in _values(state)] + options
        tensors = _Tensors([one for one in found if isinstance(one, Tensor)])
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        return self._steps, sizes, tensors.versions(), repr([one for one in found if not isinstance(one, Tensor)])


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else [state]


class _Tensors:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counted = tensors = [one for one in tensors if not is_lazy(one)]
        local = list(map(_local, tensors))
        if any(one is not whole for one, whole in zip(local, tensors, strict=True)):
            self._counted = [*tensors, *local]  # a DTensor counts for itself
        self._with_address = [one for one in local if one.layout == torch.strided]  # a sparse one has none

    def versions(self) -> tuple[list[int], list[int]]:
        counted = [one for one in self._counted if not one.is_inference()]  # of those torch counts nothing
        return list(map(Tensor.data_ptr, self._with_address)), list(map(attrgetter("_version"), counted))


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Generators:
    """The generators of Python, NumPy, torch and some devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._python = _memory_of_pythons()
        self._numpy: tuple[bytes, tuple[Any, ...]] | None = None

    def states(self) -> Any:
        """Their states, in what can be compared."""
        own = [(kind, state.numpy().tobytes()) for kind, state in device_rng_states(*self._devices)]
        return self._python_state(), self._numpy_state(), torch.get_rng_state().numpy().tobytes(), own

    def _python_state(self) -> tuple[Any, ...]:
        """Its 625 numbers take 30 us to make, so its memory is read where that is known."""
        if self._python is None:
            return random.getstate()
        return _read(*self._python), random._inst.gauss_next  # type: ignore[attr-defined]

    def _numpy_state(self) -> tuple[Any, ...]:
        """NumPy takes 40 us to make its state a tuple, so its memory is compared first."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return (repr(generator.state),)
        memory = ctypes.string_at(generator.ctypes.state_address, 4 * 624 + 4)  # the key and the position in it
        if self._numpy is None or self._numpy[0] != memory or self._numpy[1][-2]:
            # With a second normal number kept for later, which lies elsewhere, the memory does not tell everything.
            name, keys, *rest = tuple(np.random.get_state())
            self._numpy = memory, (name, np.asarray(keys).tobytes(), *rest)
        return self._numpy[1]


def _memory_of_pythons() -> tuple[int, int] | None:
    """(address, bytes) of what Python's generator draws from; None where it is laid out in another way."""
    own: Any = getattr(random, "_inst", None)
    *key, position = random.getstate()[1]
    place = id(own) + object.__basicsize__, ctypes.sizeof(ctypes.c_uint32) * (1 + len(key))
    expected = np.asarray([position, *key], dtype=np.uint32).tobytes()
    known = type(own) is random.Random and type(own).__basicsize__ >= object.__basicsize__ + place[1]
    return place if known and _read(*place) == expected else None


def _read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)
