"""The files that a framework writes into a checkpoint by itself, beside jobkit's: `save(folder)` of ctx.boundary.

Their sizes and checksums are in the manifest. They are checked, and their owner, before a framework reads them: most of
them are pickles. checkpointer.py calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from jobkit.checkpoint.reading import Damaged, agreed
from jobkit.errors import CheckpointError
from jobkit.run.files import foreign_owner, sync_folder
from jobkit.run.rundir import FRAMEWORK
from jobkit.wire.group import RankGroup

if TYPE_CHECKING:
    from jobkit.checkpoint.sources import Source

CHUNK = 4 << 20


def write(folder: Path, save: Callable[[Path], object], ranks: RankGroup) -> None:
    """Let all ranks write into the checkpoint's own folder. Raises the errors of `save`."""
    target = folder / FRAMEWORK
    ranks.on_main(lambda: target.mkdir(exist_ok=True))
    ranks.all_or_none(lambda: save(target))


def sums(folder: Path) -> dict[str, list[Any]]:
    """Return size and checksum of each file, once the disk has it and its name."""
    root = folder / FRAMEWORK
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            sync_folder(path)
    return {str(file.relative_to(root)): _facts(file, sync=True) for file in _files(root)}


def check(source: Source, ranks: RankGroup) -> None:
    """Raise Damaged, on all ranks, where a file is not as it was written; CheckpointError for one of another user."""
    files = source.manifest.files
    if not files or source.path is None:
        return
    root = source.path / FRAMEWORK

    def look() -> None:
        for name, facts in files.items() if ranks.is_main else ():
            if _facts(root / name, sync=False) != facts:
                raise Damaged(f"{root.parent.name}/{name} is not the file that was written")
            if (owner := foreign_owner(root / name)) is not None:
                raise CheckpointError(f"{root / name} belongs to {owner}: it may hold code that runs when it is read")

    agreed(ranks, look)


def folder_of(source_path: Path | None) -> Path | None:
    """Return the folder of a framework's files in a checkpoint; None where there is none."""
    folder = None if source_path is None else source_path / FRAMEWORK
    return folder if folder is not None and folder.is_dir() else None


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def _facts(file: Path, *, sync: bool) -> list[Any]:
    state = xxhash.xxh3_64()
    with file.open("rb") as content:
        if sync:
            os.fsync(content.fileno())
        while data := content.read(CHUNK):
            state.update(data)
    return [file.stat().st_size, state.hexdigest()]
