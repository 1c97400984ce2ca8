"""Collectives on a user's tensors, whatever their layout in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """What to send in place of `tensor`, which has the result at the end: itself, or a contiguous copy.

    No backend takes a view with gaps; and nccl sends elements in the order in which they lie in memory, so that ranks
    of which only some are channels-last would mix them up.
    """
    if tensor.is_contiguous():
        yield tensor
        return
    sent = tensor.contiguous()
    yield sent
    with torch.no_grad():
        once = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        # Of an expanded tensor many elements are one in memory, into which torch copies once only.
        part = tuple(slice(size) for size in once)
        tensor.as_strided(once, tensor.stride()).copy_(sent[part])
