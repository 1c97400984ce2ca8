"""Downsample ImageNet's class folders to small PNGs, as experiments/imagenet64.yaml reads them.

    python tools/prepare_imagenet.py .../ILSVRC2012/train $IMAGENET_DIR --res 64

makes DST/train_64/box/<class>/<name>.png from SRC/<class>/<name>.JPEG: the whole image, whatever its shape, averaged
down to a square with Pillow's box filter. That is the "downsampled ImageNet" of Chrabaszcz, Loshchilov and Hutter
(2017, arXiv:1707.08819), on which results for ImageNet 64 x 64 are published.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preparing
from PIL import Image
from preparing import Done, Failure
from rich.console import Console

from jobkit.run.files import content_digest, read_json, write_atomic, write_json

SUFFIXES = (".jpeg", ".jpg", ".png")
CHUNK = 64
"""Images that a worker takes at a time."""
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"


@dataclass(frozen=True)
class Chunk:
    """Some images of one class and where their PNGs go."""

    source: Path
    target: Path
    names: list[str]
    res: int
    crop: bool


def downsample(image: Image.Image, res: int, crop: bool = False) -> Image.Image:
    """The image, or its largest centred square if `crop`, as `res` x `res` RGB; ValueError for a grey one of more than
    8 bits."""
    if image.mode.startswith(("I", "F")):  # Pillow would cut such values off at 255
        raise ValueError(f"more than 8 bits a pixel (Pillow's mode {image.mode})")
    image = image.convert("RGB")
    if not crop:
        return image.resize((res, res), Image.Resampling.BOX)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((res, res), Image.Resampling.BOX, box=(left, top, left + side, top + side))


def convert(chunk: Chunk) -> Done:
    """Make the PNGs of a chunk that are not there yet; an image that cannot be read is reported and passed over."""
    chunk.target.mkdir(parents=True, exist_ok=True)
    made, kept, broken = 0, 0, []
    for name in chunk.names:
        target = chunk.target / f"{Path(name).stem}.png"
        if is_whole(target):
            kept += 1
            continue
        encoded = io.BytesIO()
        try:
            with Image.open(chunk.source / name) as image:
                downsample(image, chunk.res, chunk.crop).save(encoded, format="png")
        except Exception as error:  # a decoder may raise anything for a file that is no image
            broken.append((chunk.source / name, preparing.reason(error)))
            continue
        write_atomic(target, encoded.getvalue(), durable=False)
        made += 1
    return Done(made, kept, broken)


def is_whole(png: Path) -> bool:
    """Is there a PNG, up to its last bytes? After a power failure, a renamed file can be empty."""
    try:
        with png.open("rb") as file:
            file.seek(-len(PNG_END), os.SEEK_END)
            return file.read() == PNG_END
    except OSError:
        return False


def find_chunks(source: Path, target: Path, res: int, crop: bool) -> Iterator[Chunk]:
    """All images of `source`, class by class."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        names = sorted(name.name for name in folder.iterdir() if name.suffix.lower() in SUFFIXES)
        by_target: dict[str, str] = {}
        for name in names:
            if (other := by_target.setdefault(Path(name).stem, name)) != name:
                raise Failure(f"{folder}: {other} and {name} would both be {Path(name).stem}.png; rename one of them")
        for start in range(0, len(names), CHUNK):
            yield Chunk(folder, target / folder.name, names[start : start + CHUNK], res, crop)


def keep_origins(target: Path, source: Path, classes: dict[str, list[str]], crop: bool) -> None:
    """Write down what the classes' images are made of, and how; Failure where there are some made otherwise.

    They would count as made already. `classes`: of each the first and the last of its images' names. A source that is
    gone may have been moved, and is this one then, if those images are the same in it.
    """
    file = target.with_name("made_of.json")
    known = read_json(file) or {}
    origin, made_of = str(source.resolve()), {}
    for name, images in classes.items():
        made_of[name] = before = {"source": origin, "crop": crop}
        if (target / name).exists() and name in known:
            before = known[name]
            if before["crop"] != crop:
                how = "with --crop" if before["crop"] else "without --crop"
                raise Failure(f"{target / name} was made {how}: give another --name")
            if before["source"] != origin and not is_moved(before, name, source):
                where = f"{target / name} is of {before['source']}"
                raise Failure(f"{where}: give this source a --name of its own (or remove {file}, if it is a copy)")
        if "images" in before:
            made_of[name] |= {"images": before["images"], "sha256": before["sha256"]}
        else:
            with suppress(OSError):  # an image that cannot be read is told of later
                made_of[name] |= {"images": images, "sha256": content_digest(*(source / name / one for one in images))}
    if known | made_of != known:
        write_json(file, known | made_of, durable=False)


def is_moved(before: dict[str, Any], name: str, source: Path) -> bool:
    """Whether a class of a source that is gone is the one of this name here, as far as can be told."""
    if Path(before["source"], name).exists():
        return False
    try:
        images = [source / name / one for one in before.get("images", ())]
        return not images or content_digest(*images) == before["sha256"]
    except OSError:
        return False


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Downsample ImageNet's class folders to DST/train_RES/box/<class>/<name>.png, in parallel.",
        epilog="The same command continues an interrupted run: images that are there already are not made again. "
        + preparing.EXIT_CODES,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of class folders: SRC/n01440764/*.JPEG")
    parser.add_argument("destination", type=Path, metavar="DST", help="what IMAGENET_DIR is to be")
    parser.add_argument("--res", type=int, default=64, help="pixels a side (default: 64)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help=f"processes (default: all cores, here {cores})")
    parser.add_argument(
        "--crop",
        action="store_true",
        help="take the largest centred square instead of squeezing the whole image, into train_cropped_RES: nicer to "
        "look at, but not the data of published results",
    )
    parser.add_argument(
        "--name", help="first part of the folder's name, e.g. train_blurred (default: train, or train_cropped)"
    )
    arguments = parser.parse_args()
    arguments.name = arguments.name or ("train_cropped" if arguments.crop else "train")
    for option in ("res", "workers"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option}: found {getattr(arguments, option)}, expected 1 or more")
    return arguments


def prepare(arguments: argparse.Namespace, console: Console) -> tuple[Done, Path, Path]:
    """Convert all images in parallel: what was done, where they are, and where broken ones are to be listed."""
    source, target = arguments.source, arguments.destination / f"{arguments.name}_{arguments.res}" / "box"
    if not source.is_dir():
        raise Failure(f"{source}: no such folder; SRC holds ImageNet's class folders, as in SRC/n01440764/*.JPEG")
    try:
        with console.status(f"looking for images in {source}"):
            chunks = list(find_chunks(source, target, arguments.res, arguments.crop))
        if not chunks:
            packed = any(path.suffix == ".tar" for path in source.iterdir())
            hint = "; unpack the .tar files, each into a folder of its name" if packed else ""
            raise Failure(f"{source}: no images in it, expected SRC/<class>/*.JPEG{hint}")
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be read: {error.strerror}") from None
    preparing.check_writable(target)
    classes: dict[str, list[str]] = {}
    for chunk in chunks:
        classes[chunk.target.name] = [*classes.get(chunk.target.name, chunk.names)[:1], chunk.names[-1]]
    keep_origins(target, source, classes, arguments.crop)
    results = preparing.in_processes(convert, chunks, arguments.workers)
    done = preparing.progress(results, "images", sum(len(chunk.names) for chunk in chunks), console)
    return done, target, arguments.destination / f"broken_{arguments.res}.txt"


def main() -> int:
    """Exit code of the program."""
    arguments = parse_arguments()
    return preparing.main("prepare_imagenet", lambda console: prepare(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
