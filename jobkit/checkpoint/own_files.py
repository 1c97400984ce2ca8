"""Files that a framework writes by itself into a checkpoint: made durable, and published with the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.store import FileDigest, Manifest, Store, digest_of
from jobkit.group import RankGroup
from jobkit.run.files import fsync_dir, fsync_file

FOLDER = "files"
"""Where they are in a checkpoint."""

Write = Callable[[Path], object]
"""Called with an empty folder on all ranks together; each rank may write into it."""


def write(step: int, write_into: Write, store: Store, ranks: RankGroup, disks: Disks) -> None:
    """Begin the checkpoint of a step with what `write_into` writes. Raises on all ranks what it raises on one."""

    def make() -> None:
        (store.stage(step) / FOLDER).mkdir()

    disks.together(lambda: ranks.on_main(make))
    disks.everyone.all_or_none(lambda: write_into(store.staged(step) / FOLDER))


def make_durable(step: int, store: Store, ranks: RankGroup) -> dict[str, FileDigest]:
    """The digests of all those files, on rank 0 those of all ranks, once they are on the disk. Collective."""
    staging = store.staging(step)
    names = ranks.on_main(lambda: _names(staging))
    mine = ranks.all_or_none(lambda: {name: _settled(staging / name) for name in names[ranks.rank :: ranks.world_size]})
    for folder in {(staging / name).parent for name in mine}:
        fsync_dir(folder)
    return {name: digest for of_one in ranks.gather(mine) for name, digest in of_one.items()}


def _names(staging: Path) -> list[str]:
    return sorted(str(one.relative_to(staging)) for one in (staging / FOLDER).rglob("*") if one.is_file())


def _settled(path: Path) -> FileDigest:
    fsync_file(path)
    return digest_of(path)


def folder_in(checkpoint: Path, manifest: Manifest) -> Path | None:
    """Where they are in a checkpoint that has any."""
    has_any = any(name.startswith(f"{FOLDER}/") for name in manifest.files)
    return checkpoint / FOLDER if has_any else None
