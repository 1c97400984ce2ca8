"""What can be seen to be wrong before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jobkit.errors import InvalidValue, nearest
from jobkit.run.command_line import to_install

METHODS = ("continuous", "discrete")
SOLVERS = ("euler", "midpoint", "heun2", "dopri5")


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue for a method or a solver that there is not, for another number of classes than the images
    have, and where FID is asked for and its packages are not installed."""
    for key, allowed in (("method", METHODS), ("solver", SOLVERS)):
        if key in params and params[key] not in allowed:
            hint = nearest(str(params[key]), allowed)
            raise InvalidValue(f"params.{key}", f"found {params[key]!r}, allowed: {', '.join(allowed)}{hint}")
    if "classes" in params and not params["digits"]:
        _check_classes(Path(params["data"]), params["classes"])
    key = next((name for name in ("fid_every", "fid") if params.get(name)), None)
    if key is None:
        return
    if missing := [name for name in ("torch_fidelity", "torchvision") if find_spec(name) is None]:
        raise InvalidValue(
            f"params.{key}",
            f"FID needs {' and '.join(missing)}, not installed here: {to_install('torch-fidelity', 'torchvision')}, "
            f"or params.{key}={0 if key == 'fid_every' else 'false'} for none",
        )


def _check_classes(data: Path, classes: int) -> None:
    try:
        found = sum(entry.is_dir() for entry in data.iterdir())
    except OSError as error:
        raise InvalidValue("params.data", f"{data} cannot be read: {error.strerror}") from None
    if found != classes:
        raise InvalidValue("params.classes", f"found {classes}, and {data} has {found} folders of classes")
