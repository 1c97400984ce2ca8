"""A call of the public functions that does not fit them: one line with the signature, and no traceback.

ctx.backward(model, x, loss, y)
    -> UsageError: ctx.backward: too many positional arguments; it is ctx.backward(model, batch, loss, ...); ...

Context and jobkit.init are made with it. A TypeError from within a function stays as it is. loop/context.py and
worker/script.py wrap their public functions in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from jobkit.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

HINTS = {
    "ctx.backward: too many": "a batch is (inputs, target), as of next(loader): ctx.backward(model, (x, y), loss)",
    "ctx.log: too many": "values belong to the step that runs, ctx.step",
    "jobkit.init: got an unexpected keyword argument 'gpus'": "a rank has resources.gpus_per_task of a YAML, or one",
}
"""For calls of the second edition, by the beginning of the line."""


def fitting(
    name: str, error: Callable[[str], BaseException] = UsageError
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the function raises `error(line)` for arguments that are not its own."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*words: P.args, **options: P.kwargs) -> T:
            try:
                return function(*words, **options)
            except TypeError:
                if mistake := _mistake(name, function, words, options):
                    raise error(mistake) from None
                raise

        return call

    return decorate


def with_fitting_methods(cls: type[T]) -> type[T]:
    """A decorator of Context: its public methods are `fitting`."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("_"):
            setattr(cls, name, fitting(f"ctx.{name}")(value))
    return cls


def _mistake(name: str, function: Callable[..., Any], words: Any, options: Any) -> str:
    """A line about arguments that do not fit, with the parameters without their types; empty if they fit."""
    signature = inspect.signature(function)
    try:
        signature.bind(*words, **options)
    except TypeError as error:
        parameters = [item for item in signature.parameters.values() if item.name != "self"]
        shown = inspect.Signature([item.replace(annotation=item.empty) for item in parameters])
        line = f"{name}: {error}"
        hints = [hint for beginning, hint in HINTS.items() if line.startswith(beginning)]
        return "; ".join([line, f"it is {name}{shown}", *hints])
    return ""
