"""What is in a checkpoint: any state_dict as a skeleton plus named tensors, and the random number generators."""

from __future__ import annotations

import io
import pickle
import random
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)

_WALKED = (torch.Tensor, dict, list, tuple)


def flatten(tree: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Split a tree into a pickled skeleton and its tensors, named by their path: `state/~0/exp_avg`.

    Every dense tensor (DTensors too) leaves the skeleton; sparse and quantized ones and all other objects are pickled
    into it. One object at two places stays one object. The tensors are those of the tree, not copies.
    """
    pickler = _Pickler(named_tensors(tree))
    pickler.dump(tree)
    return pickler.buffer.getvalue(), pickler.tensors


def unflatten(skeleton: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree of a skeleton with these tensors in it; types, order and attributes are those of the flattened one."""
    return _Unpickler(skeleton, tensors).load()


def named_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors that `flatten` finds in dicts, lists and tuples, under the same names."""
    found: dict[str, torch.Tensor] = {}
    _walk(tree, "", found, set())
    return found


def escape(key: Any) -> str:
    """A dict's key or a list's index as one part of a path: no two keys give the same, none holds a slash."""
    if isinstance(key, str):
        return key.replace("~", "~~").replace("/", "~|")
    return f"~{key!r}".replace("/", "~|")


def unescape(part: str) -> str:
    """The string that `escape` was given."""
    return re.sub("~(.)", lambda match: "/" if match[1] == "|" else "~", part)


def _walk(node: Any, path: str, found: dict[str, torch.Tensor], seen: set[int]) -> None:
    if not isinstance(node, _WALKED) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        if is_raw(node):
            if path in found:
                raise ValueError(f"two keys of a state are both written {path!r}")
            found[path] = node
        return
    prefix = f"{path}/" if path else ""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, _WALKED):  # most are not: the state of Python's generator is 625 numbers
            _walk(child, prefix + escape(key), found, seen)


def is_raw(tensor: torch.Tensor) -> bool:
    """Whether the bytes of the tensor say it all."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as uint8 [n]: a view of a contiguous one, else a copy."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # up to one element is contiguous at any distance, and torch views none as another type
        flat = flat.as_strided(flat.shape, (1,)) if flat.numel() <= 1 else flat.contiguous()
    return flat.view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors; those that the path walk did not reach are named in the order met."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=4)
        self.tensors = named
        self._names = {id(tensor): name for name, tensor in named.items()}

    def persistent_id(self, value: Any) -> tuple[str, bool, bool] | None:
        if type(value) not in _TENSORS:  # asked of each object of a tree: the type alone decides for most
            return None
        name = self._names.get(id(value))
        if name is None and not is_raw(value):
            return None
        if name is None:
            name = f"~object/{len(self.tensors)}"
            self._names[id(value)], self.tensors[name] = name, value
        return name, isinstance(value, torch.nn.Parameter), value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def persistent_load(self, reference: tuple[str, bool, bool]) -> torch.Tensor:
        name, is_parameter, requires_grad = reference
        tensor = self._tensors[name]
        if not is_parameter or isinstance(tensor, torch.nn.Parameter):
            return tensor
        return self._parameters.setdefault(name, torch.nn.Parameter(tensor, requires_grad))


def rng_state(*devices: torch.device | str) -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, and of those devices' own; the CPU is torch's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "devices": device_rng_states(*devices),
    }


def device_rng_states(*devices: torch.device | str) -> list[tuple[str, torch.Tensor]]:
    """(kind, state of its generator) for each device that is not the CPU."""
    return [(device.type, _module(device).get_rng_state(*_number(device))) for device in _with_generators(devices)]


def set_rng_state(state: Mapping[str, Any], *devices: torch.device | str) -> list[torch.device]:
    """Continue the generators where `rng_state` found them, the first device of a kind as the first one was saved.

    Returns the devices of which there is no state, as where the run was on others before; they are left as they are.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = list(state["devices"])
    left = []
    for device in _with_generators(devices):
        found = next((one for one in saved if one[0] == device.type), None)
        if found is None:
            left.append(device)
        else:
            saved.remove(found)
            _module(device).set_rng_state(found[1], *_number(device))
    return left


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator of one device alone."""
    with _module(device).device(device) if device.index is not None else nullcontext():
        _module(device).manual_seed(seed)


def _with_generators(devices: Iterable[torch.device | str]) -> list[torch.device]:
    return [device for device in map(torch.device, devices) if device.type != "cpu"]


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _number(device: torch.device) -> tuple[torch.device, ...]:
    """Which device's generator is meant; mps, of which a machine has one without a number, does not ask."""
    return () if device.type == "mps" else (device,)
