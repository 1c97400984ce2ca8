"""What jobkit hangs on a user's module, which the user may copy, save and compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """Calls something in each forward of this module, in this process: a copy of the module has a hook of nothing.

    So a module can be copied and pickled whatever it calls. In a forward that is being compiled it does nothing:
    it would break the graph.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call()

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[Callable[[], object]]]:
        return ForwardHook, (nothing,)


def nothing() -> None:
    """Called by the hooks of copies."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, if it is in one."""
    while "_orig_mod" in module._modules:  # without the import of torch._dynamo, which takes a second
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module
