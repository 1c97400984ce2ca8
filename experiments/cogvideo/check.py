"""Clips, and what decoding needs, looked for before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from jobkit.errors import InvalidValue
from jobkit.run.command_line import to_install
from jobkit.run.files import files_below


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where too few clips are there, or the packages are not installed that are to decode them."""
    if "held_out" in params and not params["digits"]:
        _check_clips(Path(params["data"]), params["held_out"])
    if not params.get("vae"):
        return
    if missing := [name for name in ("diffusers", "av") if find_spec(name) is None]:
        raise InvalidValue(
            "params.vae",
            f"to decode clips needs {' and '.join(missing)}, not installed here: {to_install('diffusers', 'av')}, "
            "or leave params.vae out: latents are shown",
        )


def _check_clips(folder: Path, held_out: int) -> None:
    """Raise InvalidValue where so many clips held out leave none to train on, or none are held out."""
    if not folder.is_dir():
        raise InvalidValue("params.data", f"{folder}: no such folder")
    try:
        count = sum(1 for _ in islice(_clips(folder), max(held_out, 1) + 1))  # no more: there may be millions
    except (OSError, ValueError) as error:
        raise InvalidValue("params.data", str(error)) from None
    if count < 2:
        raise InvalidValue("params.data", f"{folder}: {count} clip(s) in it, expected 2 or more: one is for validation")
    if not 0 < held_out < count:
        found = f"found {held_out}, expected 1 or more"
        if held_out > 0:
            found = f"found {held_out}, expected 1 to {count - 1}: {folder} has {count} clips"
        raise InvalidValue("params.held_out", found)


def _clips(folder: Path) -> Iterator[bytes | Path]:
    """What clips.py, which needs torch, takes for clips: lines of a manifest, or files."""
    manifest = folder / "manifest.jsonl"
    if manifest.exists():
        with manifest.open("rb") as lines:
            yield from lines
        return
    yield from (path for path in files_below(folder) if path.suffix in (".safetensors", ".npz"))
