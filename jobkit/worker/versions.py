"""What a run's numbers depend on beside its own code: the versions and the device of an attempt, for its journal."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

import jobkit
from jobkit.train.devices import describe


def versions(device: torch.device) -> Mapping[str, str]:
    """Name -> version of what this process runs on; the last is its device."""
    found = {"jobkit": jobkit.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            found[name] = str(version)
    return found | {"device": describe(device)}
