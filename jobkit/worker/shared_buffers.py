"""Buffers, as BatchNorm's statistics: each rank may have its own between two forwards, and a checkpoint has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.train.names import plain_name
from jobkit.train.parallel import Parallel, unwrapped


class SharedBuffers:
    """The first rank's buffers, for all ranks. Every method but `end` is collective."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._lent = ExitStack()

    def share(self, modules: Iterable[nn.Module]) -> None:
        """Give every rank the first one's."""
        for module in modules:
            self._parallel.share_buffers(module)

    @contextmanager
    def shared(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """While inside, every rank has the first one's; afterwards its own again, unless it was written to."""
        if self._are_own:
            yield
            return
        modules = list(modules)
        buffers = [one for module in modules for one in unwrapped(module).buffers()]
        own = [one.detach().clone() for one in buffers]
        self.share(modules)
        shared = [one.detach().clone() for one in buffers]

        def give_back() -> None:
            for buffer, before, given in zip(buffers, own, shared, strict=True):
                if not isinstance(buffer, DTensor) and _same(buffer, given) and not _same(before, given):
                    buffer.copy_(before)

        with ExitStack() as self._lent:
            self._lent.callback(give_back)
            yield

    def end(self) -> None:
        """Give this rank its own back: a stop within `shared` is about to save them."""
        self._lent.close()

    def in_state(self, module: nn.Module, tree: Any) -> tuple[Any, dict[str, Tensor]]:
        """A module's state with copies of the first rank's buffers, and those of this rank that are others."""
        plain = {
            key: one
            for name, one in unwrapped(module).named_buffers(remove_duplicate=False)
            if (key := plain_name(name)) in tree and not isinstance(one, DTensor)
        }
        if not plain or self._are_own:
            return tree, {}
        copies = {key: one.detach().clone() for key, one in plain.items()}
        self._parallel.share(copies.values())
        tree.update(copies)
        return tree, {key: one for key, one in plain.items() if not _same(one, copies[key])}

    @property
    def _are_own(self) -> bool:
        """Whether there is nobody to share them with, or replicas drift apart on purpose."""
        return self._parallel.layout.data == 1 or self._parallel.drifts


def _same(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
