"""Digests of a state, leaf by leaf: `jobkit verify` compares two runs by them and names the leaf that differs.

    Leaves(tensors, skeleton) --leaf_digests--> {"0.weight": "9f3c...", "groups.0.lr": "0.001"}

A tensor in host memory is hashed where it lies. One of a device is reduced there, by integer arithmetic, which is exact
in any order, and 16 bytes of it come to the host. loop/trace.py and loop/untracked.py call it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.leaves import Leaves
from jobkit.checkpoint.tree import MAPPINGS, SEQUENCES

MULTIPLIERS = (-0x61C8864680B583EB, 0x2545F4914F6CDD1D)
"""Odd, and far from each other in each bit: each makes the weights of one sum."""

CHUNK = 1 << 24
"""Integers that are multiplied at once: they are copied for it."""

INTEGERS = {1: torch.uint8, 2: torch.int16}
"""By the bytes of an element: integers of its bits. Larger elements become several of 32 bits: the low bits of a round
number of 64 are zero, and a sum that wraps would keep nothing of the others."""

MOST_ITEMS = 64
"""A longer list of plain values, as a history of losses, is one leaf."""

MOST_TEXT = 48
"""Characters of a plain value that is written as it is, for a person to read."""


def leaf_digests(live: Leaves) -> dict[str, str]:
    """Return a digest of each leaf of an entry, by its path with dots: of tensors 32 hexadecimal digits, of plain
    values their text."""
    digests = dict(plain_leaves(live.skeleton))
    tensors = {**live.tensors, **live.left_out}
    digests |= tensor_digests({path.replace("/", "."): local(leaf) for path, leaf in tensors.items()})
    return digests


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's dtype, shape and bits; those of a device come to the host together."""
    digests: dict[str, str] = {}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        form = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.device.type == "cpu":
            digests[path] = xxhash.xxh3_128_hexdigest(_bits(tensor).view(torch.uint8).numpy().data, _seed(form))
        else:
            sums.setdefault(tensor.device, {})[path] = weighted_sums(tensor) + _seed(form)
    for of_device in sums.values():
        numbers = torch.stack(list(of_device.values())).cpu().tolist()
        for path, pair in zip(of_device, numbers, strict=True):
            digests[path] = "".join(f"{item % (1 << 64):016x}" for item in pair)
    return digests


def weighted_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums of a tensor's bits, int64 [2], where the tensor lies.

    They wrap, so that the order of summation does not matter, and each place has odd weights, so that a change of one
    integer, and an exchange of two, changes them.
    """
    integers = _bits(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, integers.numel(), CHUNK):
        part = integers[begin : begin + CHUNK].to(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + part.numel(), device=tensor.device)
        for number, multiplier in enumerate(MULTIPLIERS):
            sums[number] += (part * _weights(places, multiplier)).sum()
    return sums


def _weights(places: torch.Tensor, multiplier: int) -> torch.Tensor:
    """Return an odd weight for each place, of mixed bits: by weights that grow evenly, exchanges have equal sums."""
    mixed = places * multiplier
    mixed = (mixed ^ (mixed >> 32)) * multiplier
    return (mixed ^ (mixed >> 29)) | 1


def plain_leaves(skeleton: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the plain values of a skeleton; the text is a digest where it is long.

    dict(plain_leaves(flatten({"best": 0.5, "steps": [1, 2]}).skeleton))      # {"best": "0.5", "steps.0": "1", ...}
    """
    items: list[tuple[Any, Any]] | None = None
    if isinstance(skeleton, dict):
        kind, content = next(iter(skeleton.items()))
        if kind in ("tensor", "array"):
            return
        if kind in (*MAPPINGS, "defaultdict"):
            items = [(key if isinstance(key, (str, int)) else json.dumps(key), item) for key, item in content]
        elif kind in (*SEQUENCES, "deque"):
            items = list(enumerate(content)) if kind not in ("set", "frozenset") else None
    elif isinstance(skeleton, list):
        items = list(enumerate(skeleton))
    is_long = items is not None and len(items) > MOST_ITEMS and not any(isinstance(item, dict) for _, item in items)
    if items and not is_long:
        for key, item in items:
            yield from plain_leaves(item, f"{path}.{key}" if path else str(key))
    elif skeleton is not None or path:
        text = json.dumps(skeleton)
        yield path, text if len(text) <= MOST_TEXT else xxhash.xxh3_128_hexdigest(text.encode())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, flat."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(INTEGERS.get(flat.element_size(), torch.int32))


def _seed(text: str) -> int:
    return xxhash.xxh32_intdigest(text.encode())


def storage_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor's part on this rank begins."""
    tensor = local(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
