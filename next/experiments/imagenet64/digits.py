"""The small data set: scikit-learn's 1,797 handwritten digits, 8 x 8 grey, as PNG in ImageNet's layout."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(folder: Path) -> None:
    """Make `folder/<digit>/<number>.png` whole, unless the folder is there already. One process calls it at a time."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits  # here, as training on ImageNet needs no scikit-learn

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = temporary / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(image * 255 / 16).astype(np.uint8)).save(path)
    temporary.rename(folder)
