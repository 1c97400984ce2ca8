"""How the parts of a module on the meta device initialise themselves, each with whole tensors in place of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Described(Protocol):
    """What a tensor is to be like."""

    shape: torch.Size
    dtype: torch.dtype


class Block:
    """A part of a module that is initialised at once, with the parts of itself.

    `is_by_model`: by a function of the model's, which need not repeat what constructors do.
    """

    def __init__(
        self,
        name: str,
        parts: list[nn.Module],
        prefixes: list[str],
        run: list[Callable[[], Any]],
        is_by_model: bool = False,
    ) -> None:
        self.name, self.parts, self.initialisers, self.is_by_model = name, parts, run, is_by_model
        self._prefixes = prefixes
        self.names = {f"{prefix}{key}" for prefix, _, key in self._places()}

    def _places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, part in zip(self._prefixes, self.parts, strict=True):
            for held in (part._parameters, part._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        yield prefix, held, key

    @contextmanager
    def unspread(
        self, wholes: Mapping[str, Described], device: torch.device
    ) -> Iterator[Callable[[], dict[str, tuple[Tensor, int]]]]:
        """While inside, the block has whole tensors without values in place of its own.

        What is called inside gives them, by name, each with the number of times it was written to.
        """
        kept = [(held, key, held[key]) for _, held, key in self._places()]
        begun: dict[int, tuple[Tensor, int]] = {}
        made: dict[int, Tensor] = {}
        try:
            for prefix, held, key in list(self._places()):
                whole, own = wholes.get(f"{prefix}{key}"), held[key]
                if whole is None:
                    continue
                if id(whole) not in made:
                    empty = untouched(torch.empty(whole.shape, dtype=whole.dtype, device=device))
                    tensor = nn.Parameter(empty, own.requires_grad) if isinstance(own, nn.Parameter) else empty
                    made[id(whole)] = tensor
                    begun[id(tensor)] = tensor, tensor._version
                held[key] = made[id(whole)]
            yield lambda: {
                f"{prefix}{key}": (held[key].detach(), changes(held[key], begun))
                for prefix, held, key in self._places()
            }
        finally:
            for held, key, tensor in kept:
                held[key] = tensor


def blocks_of(module: nn.Module) -> tuple[list[Block], list[tuple[str, nn.Module]]]:
    """The outermost parts of a module that can initialise themselves, and those that have tensors and cannot.

    By `init_weights()` or `reset_parameters()`, or, in Hugging Face's models, the model's `_init_weights(part)`.
    """
    blocks: list[Block] = []
    missing: list[tuple[str, nn.Module]] = []
    of_part: Callable[[nn.Module], Any] | None = getattr(module, "_init_weights", None)

    def visit(name: str, part: nn.Module) -> None:
        inner = list(part.named_modules(prefix=name))
        prefixes = [f"{one}." if one else "" for one, _ in inner]
        parts = [one for _, one in inner]
        own = _initialiser(part)
        if of_part is not None and type(part).__name__ in (getattr(module, "_no_split_modules", None) or ()):
            blocks.append(Block(name, parts, prefixes, [lambda: part.apply(of_part)], True))
        elif of_part is not None:
            if any(True for _ in _own_tensors(part)):
                blocks.append(Block(name, parts[:1], prefixes[:1], [lambda: of_part(part)], True))
            visit_children(name, part)
        elif own is not None:
            run = [one for one in map(_reset, _inside_out(part)) if one is not None]
            blocks.append(Block(name, parts, prefixes, run if own in run else [*run, own]))
        else:
            if any(tensor.is_meta for tensor in _own_tensors(part)):
                missing.append((name, part))
            visit_children(name, part)

    def visit_children(name: str, part: nn.Module) -> None:
        for key, child in part.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", module)
    return blocks, missing


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """A module's parts, each after those that are inside it, as constructors come to their ends."""
    for child in module.children():
        yield from _inside_out(child)
    yield module


def _initialiser(module: nn.Module) -> Callable[[], Any] | None:
    own = getattr(module, "init_weights", None)
    return own if _takes_nothing(own) else _reset(module)


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((one for one in found if _takes_nothing(one)), None)


def _takes_nothing(function: Any) -> bool:
    if not callable(function):
        return False
    given = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty or one.kind in variable for one in given)


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    return (one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None)


def untouched(tensor: Tensor) -> Tensor:
    """Filled with what no initialiser writes everywhere, where the type has such a value."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def is_untouched(tensor: Tensor, writes: int) -> bool:
    """Whether some of what `untouched` filled it with is still there; of integers, all of it.

    Types all of whose values an initialiser may write, as a mask's bool, are known by the number of writes.
    """
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return bool((tensor == torch.iinfo(tensor.dtype).min).all())
    return writes == 0


def changes(tensor: Tensor, begun: dict[int, tuple[Tensor, int]]) -> int:
    """How often a tensor was written to since; one that has taken its place has all its values from there."""
    before = begun.get(id(tensor))
    return tensor._version - before[1] if before is not None else 1 << 62
