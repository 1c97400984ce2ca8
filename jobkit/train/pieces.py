"""Outputs of some batches as one tensor of bytes: what ranks send each other, and what is kept on the disk."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobkit.checkpoint.state import bytes_of

ALIGNMENT = 16

Leaf = Tensor | list[Any]
"""Outputs of n samples: [n, ...], or n objects."""

Batch = tuple[int, list[Leaf]]
"""A batch's number and its leaves."""


@dataclass
class Packed:
    """Some batches: pickled but for their tensors, which follow as they are in memory."""

    skeleton: bytes
    tensors: list[Tensor]
    whole: Tensor | None = None
    """Both, where they have been written already."""

    @property
    def size(self) -> int:
        if self.whole is not None:
            return self.whole.numel()
        return _aligned(8 + len(self.skeleton)) + sum(_aligned(tensor.nbytes) for tensor in self.tensors)

    def written(self) -> Tensor:
        """Bytes: the length of the pickle in the first eight, the pickle, the tensors."""
        if self.whole is not None:
            return self.whole
        piece = torch.zeros(self.size, dtype=torch.uint8)
        head = len(self.skeleton).to_bytes(8, "little") + self.skeleton
        piece[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        start = _aligned(len(head))
        for tensor in self.tensors:
            if tensor.nbytes:
                piece[start : start + tensor.nbytes] = bytes_of(tensor)
            start += _aligned(tensor.nbytes)
        return piece


def pack(batches: list[Batch]) -> Packed:
    """Batches as a piece that has not been written yet, so that its tensors are not copied so far.

    Raises ValueError where an object in it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(batches)
    except Exception as error:  # PicklingError, AttributeError, TypeError: as the object has it
        raise ValueError(f"function returned what cannot be sent from rank to rank: {error}") from error
    return Packed(buffer.getvalue(), pickler.tensors)


def unpacked(piece: Tensor) -> list[Batch]:
    """The batches of a piece; it may be overwritten then."""
    length = int.from_bytes(bytes(piece[:8].tolist()), "little")
    skeleton = piece[8 : 8 + length].numpy().tobytes()
    batches: list[Batch] = _Unpickler(io.BytesIO(skeleton), piece[_aligned(8 + length) :]).load()
    return batches


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out, wherever in an object they are: their place in a piece stands for them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._end = 0

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return None
        place = (self._end, value.dtype, tuple(value.shape))
        self.tensors.append(value.detach().resolve_conj().resolve_neg().contiguous())
        self._end += _aligned(value.nbytes)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        start, dtype, shape = place
        size = math.prod(shape) * dtype.itemsize
        return self._data[start : start + size].clone().view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
