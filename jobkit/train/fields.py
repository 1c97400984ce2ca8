"""What an object holds: attributes, __slots__, or entries; which of them its own code sets; and how they are set."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jobkit.run.installed import is_installed

FRAMEWORKS = (
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"),
    *("jobkit", "numpy"),
)
"""Packages whose objects save what they need, or are asked for it in another way."""


def fields_of(owner: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, its __slots__ included, or the entries of a list or dict, by name."""
    cls: Any = type(owner)
    if issubclass(cls, dict):
        return [(str(key), one) for key, one in list(owner.items())]
    if issubclass(cls, (list, tuple)):
        return [(str(number), one) for number, one in enumerate(owner)]
    found = list(vars(owner).items()) if cls.__dictoffset__ else []
    for name, member in _slots(cls):
        with suppress(AttributeError):  # one that has not been set
            found.append((name, member.__get__(owner)))
    return found


@cache
def _slots(cls: Hashable) -> list[tuple[str, Any]]:
    """The __slots__ of a class of the script's own, and of its bases."""
    assert isinstance(cls, type)
    members = [item for one in cls.__mro__ for item in vars(one).items()] if is_of_script(cls) else []
    return [(name, member) for name, member in members if isinstance(member, MemberDescriptorType)]


def put(owner: Any, name: str, value: Any) -> bool:
    """Give an object another value; whether that can be."""
    cls = type(owner)
    if issubclass(cls, dict):
        keys = [key for key in owner if str(key) == name]
        owner.update(dict.fromkeys(keys, value))
        return bool(keys)
    if issubclass(cls, (list, tuple)):
        if is_there := issubclass(cls, list) and int(name) < len(owner):
            owner[int(name)] = value
        return is_there
    if cls.__dictoffset__ and not isinstance(vars(cls).get(name), MemberDescriptorType):
        vars(owner)[name] = value
    else:
        object.__setattr__(owner, name, value)
    return True


def set_in_place(now: Any, new: Any) -> bool:
    """Let an object have another's content; whether it can."""
    if isinstance(now, Tensor) and isinstance(new, Tensor):
        if now.shape != new.shape or now.dtype != new.dtype or now.is_inference():
            return False
        with torch.no_grad():
            now.copy_(new)
    elif isinstance(now, np.ndarray) and isinstance(new, np.ndarray):
        if now.shape != new.shape or now.dtype != new.dtype or not now.flags.writeable:
            return False
        now[...] = new
    elif isinstance(now, (list, bytearray)) and isinstance(new, (list, bytearray)):
        now[:] = new
    elif isinstance(now, (dict, set)) and isinstance(new, (dict, set)):
        now.clear()
        now.update(new)
    elif isinstance(now, deque) and isinstance(new, deque):
        now.clear()
        now.extend(new)
    else:
        return False
    return True


@cache
def assigned_names(cls: Hashable) -> frozenset[str]:
    """Attributes that the code of a class sets, and that of its bases; those of frameworks are left out."""
    assert isinstance(cls, type)
    return names_set_by(one for one in cls.__mro__ if home(one) not in (*FRAMEWORKS, "builtins"))


def names_set_by(classes: Iterable[type]) -> frozenset[str]:
    """Attributes that the methods of some classes set, of whatever object."""
    found: set[str] = set()
    for cls in classes:
        for member in vars(cls).values():
            parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for part in parts:
                function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
                if isinstance(function, FunctionType):
                    found |= _names_set(function.__code__)
    return frozenset(found)


def _names_set(code: CodeType) -> set[str]:
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names_set(inner)
    return found


def is_of_framework(value: Any) -> bool:
    """Whether its class is one of a framework's."""
    return home(type(value)) in FRAMEWORKS


def home(cls: type) -> str:
    """The package that a class is of."""
    return (cls.__module__ or "").partition(".")[0]


@cache
def is_of_script(cls: Hashable) -> bool:
    """Whether a class is of the script's own code, and no library's."""
    assert isinstance(cls, type)
    if cls.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and home(cls) not in FRAMEWORKS and not is_installed(file)
