"""Lightning's package, which is installed under two names: `lightning.pytorch` and `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

IS_OLD_NAME = find_spec("lightning") is None or (
    "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
)
lightning: Any = import_module("pytorch_lightning" if IS_OLD_NAME else "lightning.pytorch")
environments: Any = import_module(f"lightning{'_' if IS_OLD_NAME else '.'}fabric.plugins.environments")
