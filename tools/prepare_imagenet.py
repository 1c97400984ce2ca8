"""Downsample ImageNet's class folders to small PNGs, as experiments/imagenet64.yaml reads them.

    python tools/prepare_imagenet.py .../ILSVRC2012/train $IMAGENET_DIR --res 64

makes DST/train_64/box/<class>/<name>.png from SRC/<class>/<name>.JPEG: the whole image, whatever its shape, averaged
down to a square with Pillow's box filter. That is the "downsampled ImageNet" of Chrabaszcz, Loshchilov and Hutter
(2017, arXiv:1707.08819), on which results for ImageNet 64 x 64 are published.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SUFFIXES = (".jpeg", ".jpg", ".png")
CHUNK = 64
"""Images that a worker takes at a time: what an interruption waits for."""
SHOWN = 20
"""Broken images named on the screen; all of them are in the file."""
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"


@dataclass(frozen=True)
class Chunk:
    """Some images of one class and where their PNGs go."""

    source: Path
    target: Path
    names: list[str]
    res: int
    crop: bool


@dataclass(frozen=True)
class Done:
    """What became of a chunk."""

    made: int
    kept: int
    broken: list[tuple[Path, str]]


def downsample(image: Image.Image, res: int, crop: bool = False) -> Image.Image:
    """The image, or its largest centred square if `crop`, as `res` x `res` RGB."""
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
            broken.append((chunk.source / name, " ".join(str(error).split()) or type(error).__name__))
            continue
        write(target, encoded.getvalue())
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


def write(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def find_chunks(source: Path, target: Path, res: int, crop: bool) -> Iterator[Chunk]:
    """All images of `source`, class by class."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        names = sorted(name.name for name in folder.iterdir() if name.suffix.lower() in SUFFIXES)
        for start in range(0, len(names), CHUNK):
            yield Chunk(folder, target / folder.name, names[start : start + CHUNK], res, crop)


def prepare(chunks: list[Chunk], workers: int, console: Console) -> Done:
    """Convert all chunks in parallel, under a progress bar."""
    made, kept, broken = 0, 0, []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        # Ctrl-C reaches every process of the terminal. The workers inherit the block, so it is this one's to act upon.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        results = pool.map(convert, chunks)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("images", total=sum(len(chunk.names) for chunk in chunks))
            for done in results:
                made, kept, broken = made + done.made, kept + done.kept, broken + done.broken
                progress.advance(bar, done.made + done.kept + len(done.broken))
    finally:
        pool.shutdown(cancel_futures=True)
    return Done(made, kept, broken)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Downsample ImageNet's class folders to DST/train_RES/box/<class>/<name>.png, in parallel.",
        epilog="The same command continues an interrupted run: images that are there already are not made again. "
        "Exit codes: 0 done, images that cannot be read left out; 1 failed midway; 2 wrong input, nothing was done; "
        "130 interrupted.",
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


def main() -> int:
    """Exit code of the program."""
    arguments = parse_arguments()
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def fail(code: int, message: str) -> int:
        print(f"prepare_imagenet: {message}", file=sys.stderr)
        return code

    source, target = arguments.source, arguments.destination / f"{arguments.name}_{arguments.res}" / "box"
    report = arguments.destination / f"broken_{arguments.res}.txt"
    if not source.is_dir():
        return fail(2, f"{source}: no such folder; SRC holds ImageNet's class folders, as in SRC/n01440764/*.JPEG")
    try:
        with console.status(f"looking for images in {source}"):
            chunks = list(find_chunks(source, target, arguments.res, arguments.crop))
        if not chunks:
            packed = any(path.suffix == ".tar" for path in source.iterdir())
            hint = "; unpack the .tar files, each into a folder of its name" if packed else ""
            return fail(2, f"{source}: no images in it, expected SRC/<class>/*.JPEG{hint}")
    except KeyboardInterrupt:
        return fail(130, "interrupted; nothing was done yet")
    except OSError as error:
        return fail(2, f"{error.filename}: cannot be read: {error.strerror}")
    try:
        target.mkdir(parents=True, exist_ok=True)
        write(target / ".writable", b"")
        (target / ".writable").unlink()
    except OSError as error:
        return fail(2, f"{arguments.destination}: cannot be written: {error.strerror}")

    try:
        done = prepare(chunks, arguments.workers, console)
        lines = [f"{path}: {reason}" for path, reason in done.broken]
        if lines:
            write(report, ("\n".join(lines) + "\n").encode())
        else:
            report.unlink(missing_ok=True)  # of an earlier run
    except KeyboardInterrupt:
        return fail(130, "interrupted; the same command continues")
    except BrokenProcessPool:
        return fail(1, "a worker was killed, perhaps for memory; the same command with fewer --workers continues")
    except OSError as error:
        return fail(1, f"{error.filename or target}: {error.strerror or error}; the same command continues")

    for line in lines[:SHOWN]:
        print(f"broken: {line}", file=sys.stderr)
    print(f"{target}: {done.made:,} made, {done.kept:,} already there, {len(lines):,} broken", end="")
    print(f" (all listed in {report})" if lines else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
