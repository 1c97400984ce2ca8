"""Signal handlers that are not jobkit's: what they are called, and which of them jobkit calls as well."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate")
"""Their handlers save, requeue or end the training in their own way: a stop has one owner, so they are not called."""


def is_callable(handler: object) -> bool:
    """Whether a signal calls a function of Python's that somebody has written for it."""
    return callable(handler) and handler is not signal.default_int_handler


def is_of_framework(handler: object) -> bool:
    """Whether one of FRAMEWORKS has set it."""
    return _module(_function(handler)).partition(".")[0] in FRAMEWORKS


def name_of(handler: object) -> str:
    """The handler's module and function, or what stands in its place."""
    if handler is None:
        return "a handler that is not Python's"
    if handler == signal.SIG_IGN:
        return "nothing, it is ignored"
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return "the default"
    function = _function(handler)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{_module(function)}.{name}"


def _function(handler: object) -> object:
    """What is called in the end: not the partial or the list of handlers that holds it."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler


def _module(function: object) -> str:
    return getattr(function, "__module__", None) or type(function).__module__
