"""What decoding needs, looked for before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from jobkit.errors import InvalidValue
from jobkit.run.command_line import to_install


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where clips are to be decoded and the packages for it are not installed."""
    if not params.get("vae"):
        return
    if missing := [name for name in ("diffusers", "av") if find_spec(name) is None]:
        raise InvalidValue(
            "params.vae",
            f"to decode clips needs {' and '.join(missing)}, not installed here: {to_install('diffusers', 'av')}, "
            "or leave params.vae out: latents are shown",
        )
