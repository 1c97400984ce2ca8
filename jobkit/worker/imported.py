"""Which installed packages a rank has imported, for its parent to import them before the next attempt forks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from jobkit.run import records
from jobkit.run.installed import is_installed
from jobkit.run.records import Imported
from jobkit.run.rundir import RunDir


def write_imported(run: RunDir, before: Collection[str]) -> None:
    """Leave the names of the installed modules that are imported by now and were not `before`, in their order."""
    names = [name for name, module in list(sys.modules.items()) if name not in before and _is_of_package(name, module)]
    known = records.read(Imported, run.imported_file)
    if names and (known is None or not set(names) <= set(known.modules)):
        with contextlib.suppress(OSError):  # it only saves time
            records.write(run.imported_file, Imported(modules=[*(known.modules if known else ()), *names]))


def _is_of_package(name: str, module: ModuleType) -> bool:
    """Not the user's own code, which may change from submission to submission."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if not origin or not Path(origin).is_absolute():
        return False
    return is_installed(origin) or name.partition(".")[0] == "jobkit"
