"""Clips as latents in files, <folder>/**/<name>.safetensors: `latent` [C, T, H, W] and `text` [L, D].

encode.py makes such files of videos and captions, and write_moving_digits those of the small recipe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset, Subset

import jobkit
from experiments.cogvideo.codec import SpaceToDepth

FRAMES, CANVAS, DIGIT = 5, 16, 8
MOVES = {"right": (0, 2), "left": (0, -2), "down": (2, 0), "up": (-2, 0)}
"""Pixels (down, right) that a digit moves from a frame to the next; in five frames from one edge to the other."""
WORDS = np.random.default_rng(0).standard_normal((10 + len(MOVES), 16)).astype(np.float32)
"""Embeddings of the ten digits and the directions: fixed, as those of a frozen text encoder are."""


class Clips(Dataset):
    """(latent, text) of each clip of a folder, float32. Raises UsageError for a broken file, or other shapes."""

    def __init__(self, folder: Path, latent: Sequence[int], text: Sequence[int]) -> None:
        self.shapes = {"latent": tuple(latent), "text": tuple(text)}
        self.files = sorted(path for path in folder.rglob("*.safetensors") if path.name[0] != ".")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        try:
            tensors = load_file(self.files[i])
        except (OSError, SafetensorError) as error:
            raise jobkit.UsageError(f"{self.files[i]} cannot be read: {error}") from None
        for name, shape in self.shapes.items():
            present = list(tensors[name].shape) if name in tensors else "nothing"
            if present != list(shape):
                raise jobkit.UsageError(f"{self.files[i]}: {name}: found {present}, expected {list(shape)}")
        return tensors["latent"].float(), tensors["text"].float()


def split(clips: Clips, held_out: int) -> tuple[Subset, Subset]:
    """All but `held_out` clips for training, and those for validation: the same ones in every run."""
    if not 0 < held_out < len(clips):
        raise jobkit.UsageError(f"params.held_out: found {held_out}, and params.data has {len(clips)} clips")
    order = np.random.default_rng(0).permutation(len(clips)).tolist()
    return Subset(clips, order[held_out:]), Subset(clips, order[:held_out])


def write_moving_digits(folder: Path) -> None:
    """Make clips of scikit-learn's 1,797 handwritten digits, each on its way over a canvas, unless they are there.

    latent: [4, 5, 8, 8], pixels rearranged. text: [2, 16], the embeddings of digit and direction.
    """
    if folder.exists():
        return
    from sklearn.datasets import load_digits  # here, as training on other clips needs no scikit-learn

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    digits, random, codec = load_digits(), np.random.default_rng(0), SpaceToDepth()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        direction = int(random.integers(len(MOVES)))
        move = np.array(list(MOVES.values())[direction])
        way, room = move * (FRAMES - 1), CANVAS - DIGIT
        start = random.integers(np.maximum(0, -way), np.minimum(room, room - way) + 1)  # the way stays on the canvas
        frames = torch.zeros(FRAMES, 1, CANVAS, CANVAS, dtype=torch.uint8)
        for frame in range(FRAMES):
            row, column = start + frame * move
            frames[frame, 0, row : row + DIGIT, column : column + DIGIT] = torch.from_numpy(image * 255 / 16).round()
        clip = {"latent": codec.encode(frames), "text": torch.from_numpy(WORDS[[digit, 10 + direction]])}
        save_file(clip, temporary / f"{digit}_{list(MOVES)[direction]}_{number:04d}.safetensors")
    temporary.rename(folder)
