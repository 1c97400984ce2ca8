"""The small data set: scikit-learn's handwritten digits, each moving across a canvas, as latents in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jobkit.train.prepared import prepare_folder

FRAMES, CANVAS, DIGIT = 5, 16, 8
STEPS = {"right": (0, 2), "left": (0, -2), "down": (2, 0), "up": (-2, 0)}
"""Pixels (down, right) that a digit moves from a frame to the next; in five frames from one edge to the other."""
CUT = 2
"""Space-to-depth: the pixels of each CUT x CUT square become the channels of one position, 16 x 16 become 4 x 8 x 8."""
MEAN, DEVIATION = 0.0763, 0.2298
"""Of all pixels, which are from 0 to 1: with them latents have mean 0 and variance 1, as the noise has."""
WORDS = np.random.default_rng(0).standard_normal((10 + len(STEPS), 16)).astype(np.float32)
"""Embeddings of the ten digits and the directions: fixed, as those of a frozen text encoder are."""


def write_moving_digits(folder: Path) -> None:
    """Make `folder/<digit>_<direction>_<number>.safetensors` whole, 1797 of them, unless the folder is there already.

    latent: float32 [4, 5, 8, 8]. text: float32 [2, 16], the embeddings of digit and direction.
    """
    prepare_folder(folder, _write, durable=False)


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # which takes a second, and clips of one's own do without

    digits = load_digits()
    random = np.random.default_rng(0)
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        direction = int(random.integers(len(STEPS)))
        clip = moving(image / 16, list(STEPS.values())[direction], random)
        arrays = {"latent": to_latent(clip), "text": WORDS[[digit, 10 + direction]]}
        save_file(arrays, folder / f"{digit}_{list(STEPS)[direction]}_{number:04d}.safetensors")


def moving(image: np.ndarray, step: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """A clip [FRAMES, CANVAS, CANVAS] of an image [DIGIT, DIGIT] on a way that stays on the canvas, else random."""
    way = np.array(step) * (FRAMES - 1)
    room = CANVAS - DIGIT
    start = random.integers(np.maximum(0, -way), np.minimum(room, room - way) + 1)
    clip = np.zeros((FRAMES, CANVAS, CANVAS))
    for frame in range(FRAMES):
        row, column = start + frame * np.array(step)
        clip[frame, row : row + DIGIT, column : column + DIGIT] = image
    return clip


def to_latent(clip: np.ndarray) -> np.ndarray:
    """Pixels [T, H, W] from 0 to 1 as a latent, float32 [CUT * CUT, T, H / CUT, W / CUT]."""
    frames, height, width = clip.shape
    cut = clip.reshape(frames, height // CUT, CUT, width // CUT, CUT).transpose(2, 4, 0, 1, 3)
    return ((cut.reshape(CUT * CUT, *cut.shape[2:]) - MEAN) / DEVIATION).astype(np.float32)


def to_pixels(latent: np.ndarray) -> np.ndarray:
    """The inverse of `to_latent`."""
    _, frames, rows, columns = latent.shape
    cut = latent.reshape(CUT, CUT, frames, rows, columns).transpose(2, 3, 0, 4, 1)
    return cut.reshape(frames, rows * CUT, columns * CUT) * DEVIATION + MEAN
