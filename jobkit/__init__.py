"""jobkit runs PyTorch training on a workstation or a Slurm cluster and brings every run to its end."""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and "jobkit" in sys.orig_argv[-len(sys.argv)].removeprefix("-m").split(".")[:1]:
    # `python -m jobkit`, typed in a folder whose secrets.py or queue.py is not the standard library's.
    from jobkit.start import leave_current_folder

    leave_current_folder()

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobkit.errors import JobkitError
    from jobkit.worker.context import Context
    from jobkit.worker.script import init

__all__ = ["Context", "JobkitError", "init"]
__version__ = "0.1.0"

_HOMES = {"Context": "jobkit.worker.context", "init": "jobkit.worker.script", "JobkitError": "jobkit.errors"}


def __getattr__(name: str) -> Any:
    # Imported on first use: the submitting side imports this package and must not pay for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'jobkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
