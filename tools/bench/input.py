"""Images a second of imagenet64's packed copy through jobkit's loader, against ImageFolder and DataLoader of the PNGs.

PNGs of 64 x 64 pixels, with gradients and noise so that they have the size of photographs', are written in ImageNet's
layout. Both ways read them in a random order, mirror half of them and give batches: uint8 from the packed copy, float
from ImageFolder with ToTensor. They are measured in turn, without and with worker processes; all files are in the page
cache. Where torchvision is not installed its ImageFolder is written out here:
    python tools/bench/input.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from measured import Row, absolute, ratios, tell

from experiments.imagenet64.data import open_images, split, write_png
from jobkit.train.data import Loader

RES = 64

Batches = Callable[[], Iterator[Any]]


class ByHand(Dataset[Any]):
    """What torchvision's ImageFolder does with RandomHorizontalFlip and ToTensor."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.samples = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Path(path).open("rb") as file:
            image = Image.open(file).convert("RGB")
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255), label


def image_folder(folder: Path) -> tuple[Dataset[Any], str]:
    """The dataset to compare with, and which one it is."""
    try:
        from torchvision import datasets, transforms
    except ImportError:
        return ByHand(folder), "torchvision: not installed; its ImageFolder by hand"
    steps = [transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return datasets.ImageFolder(str(folder), transforms.Compose(steps)), "torchvision's ImageFolder"


def write_images(folder: Path, count: int, classes: int) -> float:
    """Write the PNGs; returns the bytes of one on average."""
    random = np.random.default_rng(0)
    across, down = np.meshgrid(np.linspace(0, 1, RES), np.linspace(0, 1, RES))
    planes = np.stack([np.ones(RES * RES), across.ravel(), down.ravel()])
    for number in range(count):
        smooth = (random.normal(size=(3, 3)) @ planes).reshape(3, RES, RES)
        pixels = 128 + 40 * smooth + random.normal(scale=6, size=(3, RES, RES))
        file = folder / f"n{number % classes:08d}" / f"{number}.png"
        write_png(file, torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)))
    return sum(file.stat().st_size for file in folder.rglob("*.png")) / count


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def images_per_second(batches: Iterator[Any], count: int) -> float:
    """Of so many batches, after some that start workers and fill what is loaded ahead."""
    for _ in islice(batches, 8):
        pass
    images, started = 0, time.perf_counter()
    for pixels, labels in islice(batches, count):
        assert pixels.shape == (len(labels), 3, RES, RES)
        images += len(labels)
    return images / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=32, help="of one rank, as in imagenet64.yaml")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.batch
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as scratch:
        folder = Path(scratch) / "box"
        png = write_images(folder, arguments.images, classes=16)
        packed, _ = split(open_images(folder, RES, 3), 0, flip=True)
        files, what = image_folder(folder)
        images = f"{arguments.images} PNGs of {png:.0f} bytes; {what}"
        for workers in arguments.workers:

            def ours(workers: int = workers) -> Iterator[Any]:
                return Loader(packed, global_batch_size=size, num_workers=workers)

            def theirs(workers: int = workers) -> Iterator[Any]:
                options = {"num_workers": workers, "persistent_workers": workers > 0}
                return endless(DataLoader(files, size, shuffle=True, **options))

            found = [measure(ours, theirs, arguments.batches) for _ in range(arguments.repeats)]
            packed_rates, folder_rates = zip(*found, strict=True)
            times = ratios(packed_rates, folder_rates)
            note = f"{absolute(packed_rates, folder_rates, 'images/s')}; {images}"
            row = f"images a second of the packed input pipeline, {workers or 'no'} workers"
            tell(Row(row, "ImageFolder + DataLoader", times, bound=5.0, better="higher", note=note))


def measure(ours: Batches, theirs: Batches, batches: int) -> tuple[float, float]:
    """Images a second of both, one after the other."""
    return images_per_second(ours(), batches), images_per_second(theirs(), batches // 4)


if __name__ == "__main__":
    main()
