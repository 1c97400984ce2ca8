"""One optimizer step's worth of gradients: micro-batches that add up to the global batch, whatever divides what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from jobkit.train.nested import batch_size, cut

Loss = Callable[..., Tensor]
"""`loss(output, target)`: the mean over a micro-batch's samples, a scalar."""


def micro_batches(size: int, largest: int, count: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of `count` micro-batches of a share of `size` samples, as equal as can be.

    `count` is that of the largest share of any rank, so that all ranks take equally many: a sharded model's forward is
    a collective. A share that is too small for it has an empty part.
    """
    assert largest >= size
    for i in range(count):
        yield size * i // count, size * (i + 1) // count


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """`model(inputs)`; a tuple is spread over positional arguments, a dict over keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def backward(
    model: Callable[..., Any],
    inputs: Any,
    loss: Loss,
    target: Any,
    *,
    global_batch_size: int,
    data_ranks: int = 1,
    micro_batch_size: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scale: float = 1.0,
) -> Tensor:
    """Add to the gradients those of the loss's mean over the global batch; returns the mean over this rank's share.

    `inputs` and `target` are this rank's share: tensors [n, ...], or tuples or dicts of them. Each of at most
    `micro_batch_size` samples (all at once where None) goes through `loss(model(inputs), target)` and backward; its
    weight is its part of the global batch, so that shares and micro-batches of different sizes add up to exactly the
    big batch's gradient once the `data_ranks` ranks' gradients are averaged. All but the last are computed within
    `unsynchronised()`, where gradients stay on the rank. `scale` multiplies the gradients, for fp16.
    """
    size = batch_size(inputs)
    largest = math.ceil(global_batch_size / data_ranks)
    count = math.ceil(largest / (micro_batch_size or largest))
    parts = list(micro_batches(size, largest, count))
    total = torch.zeros(())
    for number, (start, stop) in enumerate(parts):
        last = number == len(parts) - 1
        samples = stop - start
        if samples == 0:  # the other ranks' micro-batches have a sample more: take part, and count for nothing
            start, stop = 0, 1
        with nullcontext() if last else unsynchronised():
            with autocast():
                value = loss(call(model, cut(inputs, start, stop)), cut(target, start, stop))
            weight = samples * data_ranks / global_batch_size
            (value * (weight * scale)).backward()  # type: ignore[no-untyped-call]
        part = value.detach() * (samples / size)
        total = part if number == 0 else total + part
    return total
