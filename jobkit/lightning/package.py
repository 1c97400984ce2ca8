"""Lightning's package, which is installed under two names: `lightning.pytorch` and `pytorch_lightning`.

callback.py and logger.py import it from here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jobkit.errors import InputError

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise InputError("jobkit.lightning: Lightning is not installed here; pip install 'lightning>=2.6'")

IS_LOADED = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
NAME = (IS_LOADED or ["lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"])[0]
lightning: Any = import_module(NAME)
FABRIC = NAME.replace("pytorch_lightning", "lightning_fabric").replace(".pytorch", ".fabric")
environments: Any = import_module(f"{FABRIC}.plugins.environments")
