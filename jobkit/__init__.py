"""jobkit: submit PyTorch training to a workstation or a Slurm cluster; whatever interrupts it, it continues.

A training function uses `jobkit.Context`; these names are imported on first use, since a submission needs no torch.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobkit import optim as optim
    from jobkit import schedule as schedule
    from jobkit.checkpoint.export import OpenedRun as OpenedRun
    from jobkit.checkpoint.export import open_run as open_run
    from jobkit.data.seeds import derive_seed as derive_seed
    from jobkit.errors import UsageError as UsageError
    from jobkit.loop.context import Context as Context
    from jobkit.loop.values import attributes as attributes
    from jobkit.parallel.pipeline import Blocks as Blocks
    from jobkit.worker.script import init as init

__version__ = "0.3.0"

_LAZY = {
    "Blocks": "jobkit.parallel.pipeline",
    "Context": "jobkit.loop.context",
    "OpenedRun": "jobkit.checkpoint.export",
    "UsageError": "jobkit.errors",
    "attributes": "jobkit.loop.values",
    "derive_seed": "jobkit.data.seeds",
    "init": "jobkit.worker.script",
    "open_run": "jobkit.checkpoint.export",
}
"""Public names, and the modules that define them."""

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "jobkit":
    # `python -m jobkit`, typed in a folder whose secrets.py or queue.py is not the standard library's.
    from jobkit.start import leave_current_folder

    leave_current_folder()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "current":
        return import_module("jobkit.loop.context").Context.current
    if name in ("optim", "schedule"):
        return import_module(f"jobkit.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'jobkit' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
