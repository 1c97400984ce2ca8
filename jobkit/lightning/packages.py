"""Lightning is installed under two names, `lightning.pytorch` and `pytorch_lightning`: the same code twice."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NAMES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Each with its Fabric."""


def _name() -> str:
    loaded = [name for name in NAMES if name in sys.modules]
    if loaded:
        return loaded[0]
    return "lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning"


lightning: Any = import_module(_name())
"""For the classes that only have methods, which are alike under each name."""


def part(trainer: Any, module: str) -> Any:
    """A module of the package that a Trainer is of."""
    name = next(name for name in NAMES if type(trainer).__module__.startswith(f"{name}."))
    return import_module(f"{name}.{module}")


def slurm_environments() -> list[Any]:
    """The class by which Lightning finds out about Slurm, under each name that is in use."""
    fabrics = [fabric for fabric in NAMES.values() if fabric in sys.modules]
    return [import_module(f"{fabric}.plugins.environments").SLURMEnvironment for fabric in fabrics]
