"""The small data set: scikit-learn's 1,797 handwritten digits, 8 x 8 grey, as PNG in ImageNet's layout; its judge."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor


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


def recognised(images: Tensor, labels: Tensor) -> float:
    """The fraction of drawn digits, uint8 [N, 1, 8, 8], that a classifier of real digits takes for their labels [N].

    The classifier is a support vector machine on all of scikit-learn's digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    digits = load_digits()
    classifier = SVC(gamma=0.001).fit(digits.data, digits.target)
    predicted = classifier.predict(images.flatten(1).double().numpy() * (16 / 255))  # pixels there go up to 16
    return float((predicted == labels.numpy()).mean())
