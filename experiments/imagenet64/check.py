"""What can be seen to be wrong before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from jobkit.errors import InvalidValue, nearest
from jobkit.run.array_files import product, shapes_in
from jobkit.run.command_line import to_install

METHODS = ("continuous", "discrete")
SOLVERS = ("euler", "midpoint", "heun2", "dopri5")
DIGITS = {"res": 8, "classes": 10}
"""What scikit-learn's handwritten digits have, of which there are so many:"""
IMAGES_OF_DIGITS = 1797
INCEPTION = {"Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3), "fc.weight": (1008, 2048)}
"""Of the weights of FID's network. Those of torchvision's Inception have the same names, and 1000 classes."""
PNG = b"\x89PNG\r\n\x1a\n"


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue for a method or a solver that there is not, for images that are not as the params say, and
    where FID is asked for and its packages are not installed, or its weights are others."""
    for key, allowed in (("method", METHODS), ("solver", SOLVERS)):
        if key in params and params[key] not in allowed:
            hint = nearest(str(params[key]), allowed)
            raise InvalidValue(f"params.{key}", f"found {params[key]!r}, allowed: {', '.join(allowed)}{hint}")
    if "classes" in params:  # it trains
        _check_data(params)
    key = next((name for name in ("fid_every", "fid") if params.get(name)), None)
    if key is None:
        return
    if missing := [name for name in ("torch_fidelity", "torchvision") if find_spec(name) is None]:
        raise InvalidValue(
            f"params.{key}",
            f"FID needs {' and '.join(missing)}, not installed here: {to_install('torch-fidelity', 'torchvision')}, "
            f"or params.{key}={0 if key == 'fid_every' else 'false'} for none",
        )
    if params["inception"]:
        _check_inception(Path(params["inception"]))


def _check_data(params: dict[str, Any]) -> None:
    res, held_out = params["res"], params["held_out"]
    if params["digits"]:
        for key, there in DIGITS.items():
            if params[key] != there:
                raise InvalidValue(f"params.{key}", f"found {params[key]}, and the digits have {there}")
        _check_held_out(held_out, IMAGES_OF_DIGITS, f"there are {IMAGES_OF_DIGITS} digits")
    else:
        _check_images(Path(params["data"]), params["classes"], res, held_out)
    times = len(params["unet"]["multipliers"]) - 1
    if res % 2**times:
        few = f"found {res}, expected a multiple of {2**times}: params.unet.multipliers halve it {times} times"
        raise InvalidValue("params.res", few)


def _check_images(data: Path, classes: int, res: int, held_out: int) -> None:
    try:
        with os.scandir(data) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir())
        if len(folders) != classes:
            raise InvalidValue("params.classes", f"found {classes}, and {data} has {len(folders)} folders of classes")
        images = list(islice(_images(folders), max(0, held_out) + 1))  # not all: there may be millions
        if not images:
            how = "tools/prepare_imagenet.py makes them"
            raise InvalidValue("params.data", f"{data}: no <class>/<name>.png in it; {how}")
        width, height = _size(images[0])
    except OSError as error:
        raise InvalidValue("params.data", f"{data} cannot be read: {error.strerror}") from None
    _check_held_out(held_out, len(images), f"{data} has {len(images)} images")
    if width != height:
        raise InvalidValue("params.data", f"{images[0]}: {width} x {height} pixels, expected as many rows as columns")
    if width not in (0, res):
        raise InvalidValue("params.res", f"found {res}, and {images[0]} has {width} x {height} pixels")


def _check_held_out(held_out: int, images: int, there: str) -> None:
    if not 0 <= held_out < images:
        few = f"found {held_out}, expected 0 {'or more' if held_out < 0 else f'to {images - 1}: {there}'}"
        raise InvalidValue("params.held_out", few)


def _images(folders: list[str]) -> Iterator[Path]:
    for folder in folders:
        with os.scandir(folder) as entries:
            yield from (Path(one.path) for one in entries if one.name.endswith(".png") and not one.name.startswith("."))


def _size(image: Path) -> tuple[int, int]:
    """Width and height, by the first bytes of a PNG; zeros where it is none."""
    with image.open("rb") as file:
        begin = file.read(24)
    if not begin.startswith(PNG) or len(begin) < 24:
        return 0, 0
    return int.from_bytes(begin[16:20], "big"), int.from_bytes(begin[20:24], "big")


def _check_inception(file: Path) -> None:
    expected = "expected the weights that docs/recipes.md names, weights-inception-2015-12-05-6726825d.pth"
    try:
        shapes = shapes_in(file)
    except OSError as error:
        raise InvalidValue("params.inception", f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidValue("params.inception", f"{error}; {expected}") from None
    for name, shape in INCEPTION.items():
        if shapes.get(name) != shape:
            found = f"{name} is {product(shapes[name])}" if name in shapes else f"no {name} in it"
            raise InvalidValue("params.inception", f"{file}: {found}; {expected}")
