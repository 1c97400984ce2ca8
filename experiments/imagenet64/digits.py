"""The small data set: scikit-learn's 1,797 handwritten digits, 8 x 8 grey, as PNG in ImageNet's layout."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(folder: Path) -> None:
    """Make `folder/<digit>/<number>.png` whole, unless the folder is there already."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits  # here, as training on ImageNet needs no scikit-learn

    folder.parent.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    temporary = Path(tempfile.mkdtemp(prefix=".digits-", dir=folder.parent))
    try:
        for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = temporary / str(digit) / f"{number:04d}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.round(image * 255 / 16).astype(np.uint8)).save(path)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():  # another run was first, else
            raise
