"""Clips, weights and packages, looked for before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.cogvideo.manifest import clips_in
from experiments.cogvideo.weights_folder import check_decoder, check_transformer, files_of_weights, shapes_of
from jobkit.errors import InvalidValue, nearest
from jobkit.run.array_files import shapes_in
from jobkit.run.command_line import to_install

FIRST = 1000
"""Clips that are looked at: there may be millions."""
READ = 16
"""Clips of which the shapes are read, too."""
DIGITS = {"latent": [4, 5, 8, 8], "text": [2, 16]}
"""The shapes of the moving digits."""


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where clips are too few or of other shapes, where weights that are to be started from or to
    decode with are missing or of another model, or the packages are not installed that are to decode."""
    if "held_out" in params and not params["digits"]:
        _check_shapes(_first_clips(Path(params["data"]), params["held_out"]), params)
    elif "held_out" in params:
        for key, shape in DIGITS.items():
            if params[key] != shape:
                raise InvalidValue(f"params.{key}", f"found {params[key]}, and the moving digits have {shape}")
    for key in ("start", "vae"):
        if params.get(key):
            _check_weights(key, Path(params[key]), params)
    if not params.get("vae"):
        return
    if missing := [name for name in ("diffusers", "av") if find_spec(name) is None]:
        raise InvalidValue(
            "params.vae",
            f"to decode clips needs {' and '.join(missing)}, not installed here: {to_install('diffusers', 'av')}, "
            "or leave params.vae out: latents are shown",
        )


def _first_clips(folder: Path, held_out: int) -> list[tuple[Path, Path]]:
    """The files of the latents and the texts of the first clips; InvalidValue where so many clips held out leave none
    to train on, or none are held out."""
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
    files = [(folder / os.fsdecode(latent), folder / os.fsdecode(text)) for latent, text in first[:FIRST]]
    for file in (file for pair in files for file in pair):
        if not file.exists():
            raise InvalidValue("params.data", f"{file}: no such file, which manifest.jsonl names")
    return files


def _check_shapes(clips: list[tuple[Path, Path]], params: dict[str, Any]) -> None:
    """Raise InvalidValue where the first clips are of other shapes than params.latent and params.text."""
    for files in clips[:READ]:
        for key, file in zip(("latent", "text"), files, strict=True):
            try:
                shapes = shapes_in(file)
            except (OSError, ValueError) as error:
                raise InvalidValue("params.data", str(error)) from None
            if key not in shapes:
                raise InvalidValue("params.data", f"{file}: no {key!r} in it{nearest(key, shapes)}")
            if (found := list(shapes[key])) != params[key]:
                meant = f"'params.{key}={str(found).replace(' ', '')}'"
                raise InvalidValue(
                    f"params.{key}", f"found {params[key]}, and {file} has {found}; did you mean {meant}?"
                )


def _check_weights(key: str, folder: Path, params: dict[str, Any]) -> None:
    """Raise InvalidValue where a folder of a model that diffusers wrote lacks a file, or is of another model."""
    if key == "vae" and list(folder.glob("*.bin")):  # diffusers itself reads those too
        return
    try:
        names = sorted(files_of_weights(folder))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"params.{key}", str(error)) from None
    for name in ("config.json", *names):
        if not (folder / name).is_file():
            raise InvalidValue(f"params.{key}", f"{folder}: no {name} in it, as diffusers keeps a model")
    try:
        if key == "start":
            check_transformer(folder, params["model"], params["latent"][0], params["text"][1])
        else:
            check_decoder(folder, params.get("latent"))
            shapes_of(folder)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"params.{key}", str(error)) from None
