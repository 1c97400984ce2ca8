"""Whether a rank computes the same bits twice: a device that computes wrongly without an error is found by that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from jobkit.checkpoint.state import bytes_of
from jobkit.errors import UsageError
from jobkit.train.data_parallel import without_synchronisation
from jobkit.train.parallel import unwrapped
from jobkit.train.seeds import preserved_generators
from jobkit.train.tracked_generator import TrackedGenerator

Result = list[Tensor | None]
"""A loss, and the gradient of each parameter."""


def computes_alike(
    model: nn.Module,
    compute: Callable[[], Tensor],
    devices: Sequence[torch.device],
    generators: Sequence[TrackedGenerator] = (),
) -> bool:
    """Whether `compute`, a loss of the model and its backward, has the same loss and gradients twice, bit for bit.

    On this rank: gradients are not sent to others. Gradients, buffers, random numbers and `generators` are then as they
    were before. Raises UsageError where it is the program that computes something else each time.
    """
    own = unwrapped(model)
    parameters = [parameter for parameter in own.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    versions = {name: one._version for name, one in own.named_parameters() if not one.requires_grad}

    def once() -> Result:
        for parameter in parameters:
            parameter.grad = None
        with (
            preserved_generators(*devices),
            _preserved(generators),
            _preserved_buffers(own),
            without_synchronisation(model),
        ):
            loss = compute()
        return [loss.detach(), *(parameter.grad for parameter in parameters)]

    try:
        first, second = once(), once()
        for name, one in own.named_parameters():
            if versions.get(name, one._version) != one._version:
                raise UsageError(f"verify_every: the forward changes the parameter {name}: make it a buffer")
        if _are_same(first, second):
            return True
        third = once()  # wrong once: two of the three are the same
        if not (_are_same(first, third) or _are_same(second, third)):
            raise UsageError(
                "verify_every: the loss or its gradients are others each time, so a fault could not be told: the "
                "forward or the loss keeps something of its own, as a counter or a generator that ctx.track was not "
                "given, or what it calls is not deterministic"
            )
        return False
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def _preserved(generators: Sequence[TrackedGenerator]) -> Iterator[None]:
    states = [one.state_dict() for one in generators]
    try:
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.load_state_dict(state)


@contextmanager
def _preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Put buffers back as they were, also those in whose place the forward puts another tensor."""
    kept = [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in kept:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                part._buffers[name] = buffer


def _are_same(one: Result, other: Result) -> bool:
    return all(_same_bits(a, b) for a, b in zip(one, other, strict=True))


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    bits = [bytes_of(tensor.detach().resolve_conj().resolve_neg()) for tensor in (one, other)]
    return torch.equal(*bits)
