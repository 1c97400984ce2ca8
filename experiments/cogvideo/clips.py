"""Clips as latents in files: one safetensors or npz file a clip, read when it is asked for.

    <folder>/**/<name>.safetensors      latent [C, T, H, W] and text [L, D], of any floating type
    <folder>/manifest.jsonl             or else a line {"latent": file, "text": file} a clip: two files of arrays

The names are listed once a run, by one process, into a file that all others read through memmap: neither the number
of clips nor their size matters for memory, and a run keeps its clips when others are added to the folder.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset, Subset

from experiments.cogvideo.manifest import SUFFIXES, clips_in
from jobkit.run.files import write_atomic


class Clips(Dataset):
    """(latent, text) of each clip, float32; ValueError names a file that is broken or of another shape.

    Args:
        folder: where the files are.
        index: what `write_index` wrote.
        latent, text: the shapes that they must have.
    """

    def __init__(self, folder: Path, index: Path, latent: Sequence[int], text: Sequence[int]) -> None:
        self.folder, self.index = folder, index
        self.latent, self.text = tuple(latent), tuple(text)
        self.names = np.load(index, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        latent, text = (self.folder / os.fsdecode(name) for name in self.names[i])
        return read(latent, "latent", self.latent), read(text, "text", self.text)

    def __reduce__(self) -> tuple[type[Clips], tuple[object, ...]]:
        # A memmap would be sent to a data loader's worker as a whole array.
        return Clips, (self.folder, self.index, self.latent, self.text)


def split(clips: Clips, held_out: int) -> tuple[Subset, Subset]:
    """All but `held_out` clips for training, and those for validation: the same ones in every run."""
    if not 0 < held_out < len(clips):
        raise ValueError(f"held_out: found {held_out}, expected 1 to {len(clips) - 1}: {clips.folder} has {len(clips)}")
    order = np.random.default_rng(0).permutation(len(clips))
    return Subset(clips, order[held_out:]), Subset(clips, order[:held_out])


def read(path: Path, key: str, shape: tuple[int, ...]) -> Tensor:
    """One array of a file as float32."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                array = torch.from_numpy(arrays[key])
        else:
            with safe_open(path, "pt") as tensors:
                array = tensors.get_tensor(key)
    except Exception as error:  # whatever its reader finds wrong with it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: no {key!r} can be read from it ({type(error).__name__}: {reason})") from error
    if array.shape != shape:
        raise ValueError(f"{path}: {key} is {_product(array.shape)}, expected {_product(shape)}")
    return array.float()


def write_index(folder: Path, index: Path) -> None:
    """Write the file names of a folder's clips, bytes [N, 2] (of the latent, of the text), unless that is done."""
    if index.exists():
        return
    names = list(clips_in(folder)) if (folder / "manifest.jsonl").exists() else sorted(clips_in(folder))
    if not names:
        raise ValueError(f"{folder}: no clips in it: neither {' nor '.join(SUFFIXES)} files nor a manifest.jsonl")
    content = io.BytesIO()
    np.save(content, np.array(names, dtype=np.bytes_))
    write_atomic(index, content.getvalue())


def _product(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
