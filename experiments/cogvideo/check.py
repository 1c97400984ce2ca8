"""Clips, weights and packages, looked for before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.cogvideo.manifest import clips_in
from jobkit.errors import InvalidValue
from jobkit.run.command_line import to_install

FIRST = 1000
"""Clips that are looked at: there may be millions."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""Or, for weights in several files, that name with .index.json, which says which tensor is in which."""


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where too few clips are there, or weights that are to be started from or to decode with, or
    the packages are not installed that are to decode."""
    if "held_out" in params and not params["digits"]:
        _check_clips(Path(params["data"]), params["held_out"])
    for key in ("start", "vae"):
        if params.get(key):
            _check_weights(key, Path(params[key]))
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
        first = list(islice(clips_in(folder), max(held_out + 1, FIRST)))
    except (OSError, ValueError) as error:
        raise InvalidValue("params.data", str(error)) from None
    count = len(first)
    if count < 2:
        raise InvalidValue("params.data", f"{folder}: {count} clip(s) in it, expected 2 or more: one is for validation")
    if not 0 < held_out < count:
        found = f"found {held_out}, expected 1 or more"
        if held_out > 0:
            found = f"found {held_out}, expected 1 to {count - 1}: {folder} has {count} clips"
        raise InvalidValue("params.held_out", found)
    for name in (name for names in first[:FIRST] for name in names):
        if not (folder / os.fsdecode(name)).exists():
            raise InvalidValue("params.data", f"{folder / os.fsdecode(name)}: no such file, which manifest.jsonl names")


def _check_weights(key: str, folder: Path) -> None:
    """Raise InvalidValue where a folder of a model that diffusers wrote lacks a file."""
    if key == "vae" and list(folder.glob("*.bin")):  # diffusers itself reads those too
        return
    try:
        names = sorted(files_of_weights(folder))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"params.{key}", str(error)) from None
    for name in ("config.json", *names):
        if not (folder / name).is_file():
            raise InvalidValue(f"params.{key}", f"{folder}: no {name} in it, as diffusers keeps a model")


def files_of_weights(folder: Path) -> set[str]:
    """The files of the weights of a model that diffusers wrote; ValueError where its index does not say."""
    index = folder / f"{WEIGHTS}.index.json"
    if not index.exists():
        return {WEIGHTS}
    return set(weight_map(index).values())


def weight_map(index: Path) -> dict[str, str]:
    """Which tensor is in which file, by an index; ValueError where it does not say, OSError where it cannot be read."""
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: cannot be read: {type(error).__name__}: {error}") from None
    raise ValueError(f"{index}: its weight_map names other things than files")
