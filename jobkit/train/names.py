"""A module's state under the names that it has without torch.compile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

COMPILED = "_orig_mod"
"""What torch.compile calls the module inside the one it returns: a part of the names of all in it."""


def plain_name(name: str) -> str:
    """The name of a parameter, a buffer or a module as it is where nothing is compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters by plain names; a tied one has its first."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def module_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` by plain names."""
    state: Any = module.state_dict()
    if not _has_compiled(module):
        return state  # type: ignore[no-any-return]
    plain: Any = OrderedDict((plain_name(name), value) for name, value in state.items())
    # The versions of modules; of a compiled one that of the module inside, which comes later, is the true one.
    plain._metadata = OrderedDict((plain_name(name), about) for name, about in state._metadata.items())
    return plain  # type: ignore[no-any-return]


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """`module.load_state_dict` of a state by plain names, whatever is compiled of the module."""
    if _has_compiled(module):
        live = {plain_name(name): name for name in module.state_dict()}
        named: Any = OrderedDict((live.get(name, name), value) for name, value in state.items())
        if (versions := getattr(state, "_metadata", None)) is not None:
            modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
            named._metadata = OrderedDict((n, versions[plain_name(n)]) for n in modules if plain_name(n) in versions)
        state = named
    module.load_state_dict(state)


def _has_compiled(module: nn.Module) -> bool:
    return any(COMPILED in name.split(".") for name, _ in module.named_modules())
