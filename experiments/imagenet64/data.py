"""Images in folders, `<class>/<name>.png`, and a packed copy beside them so that decoding is paid once.

    train_64/box/<class>/<name>.png         the images
    train_64/box.uint8/<fingerprint>/       images.npy [N, R, R, C], labels.npy [N], classes.npy

The packed copy is read through memmap: its size does not matter for memory. Its name is a fingerprint of the
folders: where they change, a new copy is made beside the old one, which a running job may still read.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import socket
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import jobkit

CHUNK = 2048
"""Images that one process decodes at a time."""


class PackedImages(Dataset):
    """(uint8 image [C, R, R], label) from a packed copy; `classes` are the names of the folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # As plain arrays: indexing one of the class memmap takes as long as copying the image.
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.labels = np.asarray(np.load(folder / "labels.npy", mmap_mode="r"))
        self.classes = np.load(folder / "classes.npy").tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[i].transpose(2, 0, 1).copy()), int(self.labels[i])

    def __reduce__(self) -> tuple[type[PackedImages], tuple[Path]]:
        return PackedImages, (self.folder,)  # a memmap would be sent to a data loader's worker as a whole array


class Part(Dataset):
    """Some of the images, mirrored half of the time if `flip`."""

    def __init__(self, images: PackedImages, ids: Sequence[int] | np.ndarray, flip: bool = False) -> None:
        self.images, self.ids, self.flip = images, ids, flip

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = self.images[int(self.ids[i])]
        if self.flip and random.random() < 0.5:  # torch.rand takes ten times as long for one number
            image = image.flip(-1)
        return image, label


def split(images: PackedImages, held_out: int, flip: bool) -> tuple[Part, Part]:
    """All but `held_out` images for training, and the others for validation: the same images in every run."""
    if not 0 <= held_out < len(images):
        raise jobkit.UsageError(f"params.held_out: found {held_out}, expected 0 to {len(images) - 1}")
    order = np.random.default_rng(0).permutation(len(images))
    return Part(images, order[held_out:], flip), Part(images, order[:held_out])


def pack(folder: Path, res: int, channels: int) -> Path:
    """Make the packed copy of a folder unless it is there; returns its path. One process calls it at a time.

    Raises UsageError for a folder without images, and for an image that is broken or of another size.
    """
    packed = folder.with_name(folder.name + ".uint8") / fingerprint(folder, res, channels)
    if not packed.exists():
        temporary = packed.with_name(f".{packed.name}.{socket.gethostname()}.{os.getpid()}")
        temporary.mkdir(parents=True)
        _pack(folder, res, channels, temporary)
        temporary.rename(packed)
    return packed


def fingerprint(folder: Path, res: int, channels: int) -> str:
    """16 hex digits that change when an image is added, removed or replaced by renaming.

    It reads the class folders' modification times alone: a million files are not looked at in every process.
    """
    state = [(entry.name, entry.stat().st_mtime_ns) for entry in _class_folders(folder)]
    return hashlib.sha256(repr((res, channels, state)).encode()).hexdigest()[:16]


def decode(path: Path, res: int, channels: int) -> np.ndarray:
    """An image file as uint8 [R, R, C]; UsageError names one that is broken or of another size."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut such values off at 255
                raise jobkit.UsageError(f"{path}: more than 8 bits a pixel (Pillow's mode {image.mode})")
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except OSError as error:
        raise jobkit.UsageError(f"{path}: not a whole image ({error})") from error
    if pixels.shape[:2] != (res, res):
        raise jobkit.UsageError(f"{path}: {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {res} x {res}")
    return pixels.reshape(res, res, channels)


def write_png(path: Path, image: Tensor) -> None:
    """Write a uint8 image [C, H, W]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(path)


def _class_folders(folder: Path) -> list[os.DirEntry[str]]:
    if not folder.is_dir():
        raise jobkit.UsageError(f"params.data: there is no folder {folder}")
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def _pack(folder: Path, res: int, channels: int, temporary: Path) -> None:
    """Write the packed copy into a folder."""
    classes = [entry.name for entry in _class_folders(folder)]
    images = [sorted(file for file in (folder / name).glob("*.png") if file.name[0] != ".") for name in classes]
    files = [file for of_class in images for file in of_class]
    if not files:
        raise jobkit.UsageError(f"params.data: {folder} has no <class>/<name>.png in it")
    np.save(temporary / "labels.npy", np.repeat(np.arange(len(classes)), [len(of_class) for of_class in images]))
    np.save(temporary / "classes.npy", np.array(classes))
    pixels = temporary / "images.npy"
    np.lib.format.open_memmap(pixels, "w+", np.uint8, (len(files), res, res, channels)).flush()

    chunks = {start: files[start : start + CHUNK] for start in range(0, len(files), CHUNK)}
    workers = min(len(os.sched_getaffinity(0)), len(chunks))
    print(f"packing {len(files):,} images once, with {workers} process(es)", flush=True)
    # Spawned, not forked: this process may have threads of torch or CUDA running.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        run = pool.map if workers > 1 else map
        list(run(partial(_fill, pixels), chunks.keys(), chunks.values()))  # raises the error of a process


def _fill(pixels: Path, start: int, files: list[Path]) -> None:
    packed = np.load(pixels, mmap_mode="r+")
    for i, file in enumerate(files, start):
        packed[i] = decode(file, *packed.shape[2:])
