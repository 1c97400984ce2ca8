"""The gradients of one optimizer step: micro-batches that add up to the global batch, on any number of ranks.

    batch --cut--> micro-batches --loss(model(x), y) x weight--> backward, without communication but for the last

step.py calls `backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from jobkit.data.batch import batch_size, check_can_be_cut, cut
from jobkit.errors import UsageError

Loss = Callable[..., Tensor]
"""`loss(output, target)`: the mean over a micro-batch's samples, a scalar."""


def micro_batches(size: int, largest: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of `count` micro-batches of a share of `size` samples, as equal as can be.

    All ranks take the `count` of the largest share: a sharded model's forward is a collective. A share that is too
    small for it has an empty part.
    """
    assert largest >= size
    for i in range(count):
        yield size * i // count, size * (i + 1) // count


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return `model(inputs)`; a tuple is spread over positional arguments, a dict over keyword arguments."""
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
    global_batch_size: int | None = None,
    data_ranks: int = 1,
    micro_batch_size: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scale: float = 1.0,
    add_up: Callable[[Tensor], dist.Work | None] | None = None,
) -> Tensor:
    """Add the gradients of the loss's mean over the global batch; returns the mean over the samples that were given.

    `inputs` and `target` are this rank's share: tensors [n, ...], or tuples or dicts of them. Each of at most
    `micro_batch_size` samples (all at once where None) goes through `loss(model(inputs), target)` and backward; its
    weight is its part of the global batch, so that shares and micro-batches of different sizes add up to exactly the
    big batch's gradient once the `data_ranks` ranks' gradients are averaged. All but the last are computed within
    `unsynchronised()`, where gradients stay on the rank. `scale` multiplies the gradients, for fp16.

    `global_batch_size` is the sum of all ranks' shares, which differ by at most one sample. `add_up` begins to add a
    tensor up over the ranks, in place, and is waited for after backward; without it the mean is of this rank's share.
    Raises UsageError for a share that the global batch has no room for.
    """
    size = batch_size(inputs)
    if global_batch_size is None:
        global_batch_size = size * data_ranks
    largest = math.ceil(global_batch_size / data_ranks)
    if size > largest:
        raise UsageError(
            f"ctx.backward: of {global_batch_size} sample(s) on {data_ranks} rank(s) each has at most {largest}, and "
            f"this rank was given {size}: pass global_batch_size, the samples on all ranks together"
        )
    if not largest:
        raise UsageError("ctx.backward was given no sample on any rank: leave such a batch out, on all of them")
    parts = list(micro_batches(size, largest, math.ceil(largest / (micro_batch_size or largest))))
    if len(parts) > 1:
        check_can_be_cut(inputs, size, "the input")
        check_can_be_cut(target, size, "the target")
    # In one piece nothing is cut: a tensor with another first dimension than the samples stays whole.
    is_whole = len(parts) == 1 and size > 0
    total = torch.zeros(())
    added: dist.Work | None = None
    for number, (begin, end) in enumerate(parts):
        last = number == len(parts) - 1
        samples = end - begin
        if not samples:  # the other ranks' micro-batches have a sample more: take part, and count for nothing
            begin, end = 0, 1
        with nullcontext() if last else unsynchronised():
            with autocast():
                x, y = (inputs, target) if is_whole else (cut(inputs, begin, end), cut(target, begin, end))
                value = loss(call(model, x), y)
            mean = _whole(value) if samples else torch.zeros_like(_whole(value))  # of no sample it may be a NaN
            part = mean * samples
            total = part if number == 0 else total + part
            if last and add_up is not None:
                both = torch.stack([total, total.new_full((), size)])  # the samples given may be a part of the batch
                added = add_up(both)  # sent beside the gradients
            weight = samples * data_ranks / global_batch_size
            (value * (weight * scale)).backward()  # type: ignore[no-untyped-call]
    if added is None:
        return total / max(1, size)
    added.wait()
    return both[0] / both[1]


def _whole(value: Tensor) -> Tensor:
    """Return a loss to add up: in float32 at least, and not spread over the ranks that compute it together."""
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.to(torch.promote_types(value.dtype, torch.float32))
