"""What FID needs, looked for before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from jobkit.errors import InvalidValue
from jobkit.run.command_line import to_install


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where FID is asked for and its packages are not installed."""
    key = next((name for name in ("fid_every", "fid") if params.get(name)), None)
    if key is None:
        return
    if missing := [name for name in ("torch_fidelity", "torchvision") if find_spec(name) is None]:
        raise InvalidValue(
            f"params.{key}",
            f"FID needs {' and '.join(missing)}, not installed here: {to_install('torch-fidelity', 'torchvision')}, "
            f"or params.{key}={0 if key == 'fid_every' else 'false'} for none",
        )
