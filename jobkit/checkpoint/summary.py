"""A short description of a state_dict by which two of them are compared: of one rank and another, of now and before."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.state import bytes_of

_WINDOW = 16
"""Elements looked at in one place of a tensor, of three; a tensor of no more than these is looked at whole."""

_MOST_TENSORS = 2000
"""Tensors whose elements are looked at, by default: those of a larger state are taken at equal distances."""

_ROUNDING = 1e-3
"""Relative difference up to which numbers are said to differ by rounding, as on machines of two kinds."""

Summary = dict[str, tuple[str, bytes]]
"""For each leaf of a tree, by its path: what it is, and its value or, of a tensor, some of its elements."""


@dataclass(frozen=True)
class Difference:
    """The first leaf in which two summaries differ."""

    path: str
    here: str
    there: str
    is_rounding: bool


def summarise(tree: Any, *, whole_up_to: int = 3 * _WINDOW, most: int = _MOST_TENSORS) -> Summary:
    """What `tree` consists of. Equal trees have equal summaries, whichever process made them.

    A tensor of at most `whole_up_to` elements is looked at whole, of others a few elements are, in one copy from each
    device for all of them; of a DTensor, which is a part on each rank, nothing is. Two trees of equal summaries may
    differ: in elements between those looked at. Of more than `most` tensors some are not looked at.
    """
    found: Summary = {}
    tensors: dict[str, Tensor] = {}
    for path, leaf in _leaves(tree, "", ()):
        if isinstance(leaf, np.generic):
            leaf = leaf.item()
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        if isinstance(leaf, Tensor):
            found[path] = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}", b""
            if leaf.layout == torch.strided and not leaf.is_quantized and not leaf.is_meta and leaf.numel():
                tensors[path] = leaf
        else:
            found[path] = type(leaf).__name__, _value(leaf)
    tensors = {path: one for path, one in tensors.items() if not isinstance(one, DTensor)}
    for path, elements in _elements(_some(tensors, most), whole_up_to).items():
        found[path] = found[path][0], elements
    return found


def digest(summary: Summary) -> str:
    """A number that is another one for another summary."""
    found = hashlib.blake2b(digest_size=16)
    for path, (kind, value) in sorted(summary.items()):
        found.update(repr((path, kind, len(value))).encode())
        found.update(value)  # as it is: written out as text a tensor of 65,536 numbers took milliseconds
    return found.hexdigest()


def first_difference(here: Summary, there: Summary) -> Difference | None:
    """The first leaf that differs by more than rounding, else the first that differs; None where none does."""
    rounding = None
    for path in [*here, *(path for path in there if path not in here)]:
        ours, theirs = here.get(path), there.get(path)
        if ours == theirs:
            continue
        found = Difference(path, _show(ours), _show(theirs), _is_rounding(ours, theirs))
        if not found.is_rounding:
            return found
        rounding = rounding or found
    return rounding


def _leaves(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """What stands at the ends of dicts, lists and tuples, by its path: `param_groups.0.lr`."""
    if not isinstance(node, (dict, list, tuple)) or not node or id(node) in above:
        yield path, f"in itself {len(above)}" if id(node) in above else node
        return
    prefix = f"{path}." if path else ""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, (dict, list, tuple)):
            yield from _leaves(child, f"{prefix}{key}", (*above, id(node)))
        else:
            yield f"{prefix}{key}", child


class _Pickler(pickle.Pickler):
    """Writes equal objects down equally, whichever process made them."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) is str:  # two equal ones are one object or two, as a process happens to keep them
            return value.encode(errors="surrogatepass")
        if isinstance(value, (set, frozenset)):  # whose order differs from process to process
            return type(value).__name__.encode(), sorted(map(_value, value))
        if isinstance(value, Tensor):  # pickled it would have the address of its memory
            found = summarise(value)[""]
            return found[0].encode(), found[1]
        return None


def _value(leaf: Any) -> bytes:
    if leaf is None or type(leaf) in (bool, int, float, complex, str, bytes, dict, list, tuple):
        return repr(leaf).encode()
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(leaf)
    except Exception:  # whatever it is, a save will say it
        return b"cannot be pickled"
    return buffer.getvalue()


def _some(tensors: Mapping[str, Tensor], most: int) -> dict[str, Tensor]:
    distance = -(-len(tensors) // most) or 1
    return dict(list(tensors.items())[::distance])


def _elements(tensors: Mapping[str, Tensor], whole_up_to: int) -> dict[str, bytes]:
    """Some elements of each tensor: one copy from each device, however many tensors there are."""
    by_device: dict[torch.device, dict[str, list[Tensor]]] = {}
    for path, tensor in tensors.items():
        by_device.setdefault(tensor.device, {})[path] = windows(tensor, whole_up_to)
    found = {}
    for parts in by_device.values():
        data = torch.cat([window for several in parts.values() for window in several]).cpu().numpy().tobytes()
        start = 0
        for path, several in parts.items():
            stop = start + sum(map(len, several))
            found[path] = data[start:stop]
            start = stop
    return found


def windows(tensor: Tensor, whole_up_to: int = 3 * _WINDOW) -> list[Tensor]:
    """Views of some elements of a dense tensor, as uint8 [n]; of what is not contiguous in any order, copies."""
    flat = _flat(tensor.detach().resolve_conj().resolve_neg())
    size = flat.numel()
    if size <= max(whole_up_to, 3 * _WINDOW):
        return [bytes_of(flat)]
    starts = (0, (size - _WINDOW) // 2, size - _WINDOW)
    return [bytes_of(flat[start : start + _WINDOW]) for start in starts]


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():  # as with channels last
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return tensor.reshape(-1)


def _show(leaf: tuple[str, bytes] | None) -> str:
    """A leaf for a person: the value of a number or string, the type of what is larger."""
    if leaf is None:
        return "not there"
    kind, value = leaf
    numbers = _numbers(leaf)
    if numbers is not None and "[" in kind:
        return f"{kind} {' '.join(f'{number:.6g}' for number in numbers[:3])} ..."
    text = value.decode(errors="replace")
    return text if value and text.isprintable() and len(text) <= 60 else kind


def _is_rounding(here: tuple[str, bytes] | None, there: tuple[str, bytes] | None) -> bool:
    if here is None or there is None or here[0] != there[0]:
        return False
    ours, theirs = _numbers(here), _numbers(there)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    largest = max((abs(number) for number in (*ours, *theirs) if math.isfinite(number)), default=0.0)
    return all(_is_near(a, b, _ROUNDING * largest) for a, b in zip(ours, theirs, strict=True))


def _is_near(a: float, b: float, distance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= distance


def _numbers(leaf: tuple[str, bytes]) -> Sequence[float] | None:
    """The floating-point numbers of a leaf; None where it has others or none."""
    kind, value = leaf
    if kind == "float":
        return [float(value)]
    dtype = getattr(torch, kind.split(" ")[0], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not value:
        return None
    numbers: Iterable[float] = torch.frombuffer(bytearray(value), dtype=dtype).double().tolist()
    return list(numbers)
