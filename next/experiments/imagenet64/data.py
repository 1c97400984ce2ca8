"""Images in folders, `<class>/<name>.png`, and a packed copy beside them so that decoding is paid once.

    train_64/box/<class>/<name>.png         the images
    train_64/box.uint8/<fingerprint>/       images.npy [N, R, R, C], labels.npy [N], classes.npy

The packed copy is read through memmap: its size does not matter for memory. Its name is a fingerprint of the
folders, so a copy that no longer fits is never opened; a new one is made beside it, because a running job may still
read the old one.
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
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset

CHUNK = 2048
"""Images that one worker decodes at a time."""


class PngImages(Dataset):
    """(uint8 image [C, R, R], label) decoded at every access."""

    def __init__(self, folder: Path, res: int, channels: int) -> None:
        self.folder, self.res, self.channels = folder, res, channels
        self.fingerprint = fingerprint(folder, res, channels)
        """Of the images as they were when they were opened."""
        self.classes = [entry.name for entry in _class_folders(folder)]
        self.files: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = sorted(file.name for file in (folder / name).glob("*.png") if file.name[0] != ".")
            self.files += [f"{name}/{file}" for file in files]
            labels += [label] * len(files)
        if not self.files:
            raise ValueError(f"{folder}: no <class>/<name>.png in it; tools/prepare_imagenet.py makes them")
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return read_png(self.folder / self.files[i], self.res, self.channels), int(self.labels[i])


class PackedImages(Dataset):
    """The same from a packed copy."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fingerprint = folder, folder.name
        # As plain arrays: indexing one of the class memmap takes as long as copying the image.
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.labels = np.asarray(np.load(folder / "labels.npy", mmap_mode="r"))
        self.classes = np.load(folder / "classes.npy").tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return _to_tensor(self.images[i]), int(self.labels[i])

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
    order = np.random.default_rng(0).permutation(len(images))
    return Part(images, order[held_out:], flip), Part(images, order[:held_out])


def pack(folder: Path, res: int, channels: int) -> Path:
    """Make the packed copy of a folder unless it is there; returns its path. One process calls it at a time."""
    packed = folder.with_name(folder.name + ".uint8") / fingerprint(folder, res, channels)
    if not packed.exists():
        temporary = packed.with_name(f".{packed.name}.{socket.gethostname()}.{os.getpid()}")
        temporary.mkdir(parents=True)
        _pack(PngImages(folder, res, channels), temporary)
        temporary.rename(packed)
    return packed


def fingerprint(folder: Path, res: int, channels: int) -> str:
    """16 hex digits that change when an image is added, removed or replaced by renaming.

    It reads the class folders' modification times alone: a million files are not looked at in every process.
    """
    state = [(entry.name, entry.stat().st_mtime_ns) for entry in _class_folders(folder)]
    return hashlib.sha256(repr((res, channels, state)).encode()).hexdigest()[:16]


def decode(path: Path, res: int, channels: int) -> np.ndarray:
    """An image file as uint8 [R, R, C]; ValueError names one that is broken or of another size."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut such values off at 255
                raise ValueError(f"{path}: more than 8 bits a pixel (Pillow's mode {image.mode})")
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except OSError as error:
        raise ValueError(f"{path}: not a whole image ({error})") from error
    if pixels.shape[:2] != (res, res):
        raise ValueError(f"{path}: {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {res} x {res}")
    return pixels.reshape(res, res, channels)


def read_png(path: Path, res: int, channels: int) -> Tensor:
    """An image file as uint8 [C, R, R]; ValueError as from `decode`."""
    return _to_tensor(decode(path, res, channels))


def write_png(path: Path, image: Tensor) -> None:
    """Write a uint8 image [C, H, W]; the file appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(part, format="png")
    part.replace(path)


def _class_folders(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def _to_tensor(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _pack(images: PngImages, temporary: Path) -> None:
    """Write the packed copy into a folder."""
    np.save(temporary / "labels.npy", images.labels)
    np.save(temporary / "classes.npy", np.array(images.classes))
    pixels = temporary / "images.npy"
    np.lib.format.open_memmap(pixels, "w+", np.uint8, (len(images), images.res, images.res, images.channels)).flush()

    starts = range(0, len(images), CHUNK)
    files = [images.files[start : start + CHUNK] for start in starts]
    fill = partial(_fill, pixels, images.folder)
    workers = min(len(os.sched_getaffinity(0)), len(starts))
    print(f"packing {len(images):,} images once, with {workers} process(es)", flush=True)
    if workers == 1:
        for _ in track(map(fill, starts, files), "packing", total=len(starts)):
            pass
    else:
        # Spawned, not forked: this process may have threads of torch or CUDA running.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            for _ in track(pool.map(fill, starts, files), "packing", total=len(starts)):
                pass


def _fill(pixels: Path, folder: Path, start: int, files: list[str]) -> None:
    packed = np.load(pixels, mmap_mode="r+")
    for i, file in enumerate(files, start):
        packed[i] = decode(folder / file, *packed.shape[2:])
