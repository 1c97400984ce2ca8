"""The folder of a run's checkpoints: each is there whole, under its name, or not at all.

    checkpoints/
      step_00000500/           rank_<n>.safetensors, manifest.json (checksums), framework/ (files of a framework)
      latest -> step_00000500  best -> step_00000300
      .step_00000600.<attempt> being written; a rename publishes it
      damaged_step_00000400    set aside: it did not verify

Rank 0 calls this for the run, or the first rank of each disk for its disk. No tensor is read or written here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from jobkit.checkpoint.shard import ShardInfo
from jobkit.run.files import is_there, json_text, read_json, replace_link, sync_folder, write_json
from jobkit.run.rundir import CHECKPOINT

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
UNFINISHED = re.compile(r"\.step_(\d{8,})\.")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of a checkpoint: written last, so that a folder without it is no checkpoint."""

    step: int
    world_size: int
    shards: Mapping[str, ShardInfo]
    """By file name."""
    entries: list[str] = field(default_factory=list)
    """Names of the tracked objects."""
    extra: dict[str, Any] = field(default_factory=dict)
    """For the loop: the boundary, the place in the curves."""
    pickled: list[str] = field(default_factory=list)
    """Values that had to be pickled: the files are read only if they belong to the user."""
    files: Mapping[str, list[Any]] = field(default_factory=dict)
    """A framework's files: name -> [size, checksum]."""
    best: float | None = None
    """The metric of `checkpoint.best`, where it was known."""

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint, with a checksum of its own. Raises OSError."""
        value = {**vars(self), "shards": {name: info.as_json() for name, info in self.shards.items()}}
        value = json.loads(json_text(value))
        write_json(folder / MANIFEST, {**value, "checksum": _checksum(value)})

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a checkpoint; None where there is none that can be read and verifies."""
        value = read_json(folder / MANIFEST, fresh=True)
        if not isinstance(value, dict) or value.pop("checksum", None) != _checksum(value):
            return None
        return cls(**{**value, "shards": {name: ShardInfo.of_json(info) for name, info in value["shards"].items()}})


def _checksum(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json_text(value, indent=None).encode())


class Store:
    """The checkpoints of one run on one disk.

    store = Store(run.checkpoints, "3")
    folder = store.begin(500)                       # the ranks write their shards there
    store.publish(folder, Manifest(step=500, ...))
    store.trim(keep=3)
    store.steps()                                   # [500, 400, 300]
    """

    def __init__(self, folder: Path, attempt: str) -> None:
        self.folder, self.attempt = folder, attempt

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first."""
        if not is_there(self.folder):
            return []
        names = (CHECKPOINT.fullmatch(entry.name) for entry in os.scandir(self.folder))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def unfinished(self, step: int) -> Path:
        """Return the folder in which this attempt writes a checkpoint."""
        return self.folder / f".step_{step:08d}.{self.attempt}"

    def begin(self, step: int) -> Path:
        """Make the folder for a new checkpoint."""
        folder = self.unfinished(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Give a complete checkpoint its name, durably. An older one of the same step makes way.

        The manifest comes last: with its name, those of all files in the folder are on the disk.
        """
        manifest.write(folder)
        final = self.path(manifest.step)
        old = self._out_of_the_way(final) if final.exists() else None
        folder.rename(final)
        sync_folder(self.folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        replace_link(self.folder / LATEST, final)

    def _out_of_the_way(self, final: Path) -> Path:
        """Rename a checkpoint before it is deleted: a half-deleted one must not have a checkpoint's name."""
        target = self.folder / f".old.{final.name}.{self.attempt}"
        shutil.rmtree(target, ignore_errors=True)
        final.rename(target)
        return target

    def trim(self, keep: int, protected: Collection[int] = ()) -> None:
        """Delete all but the newest `keep`, and the protected ones."""
        for step in self.steps()[keep:]:
            if step not in protected:
                self.delete(step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; a reader sees it whole until its name is gone.

        On NFS files that somebody reads cannot be deleted with their folder yet: `clean` does it later.
        """
        shutil.rmtree(self._out_of_the_way(self.path(step)), ignore_errors=True)

    def make_room(self, protected: Collection[int]) -> int | None:
        """Delete the oldest checkpoint for a new one on a full disk; returns its step, None if there is none to give.

        The newest always stays: until the next is durable it is the only sure state.
        """
        candidates = [step for step in self.steps()[1:] if step not in protected]
        if not candidates:
            return None
        self.delete(candidates[-1])
        return candidates[-1]

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint that does not verify; returns its new path."""
        target = self.folder / f"damaged_step_{step:08d}"
        if target.exists():
            target = target.with_name(f"{target.name}.{int(time.time())}")
        if self._best_step() == step:
            (self.folder / BEST).unlink()
        self.path(step).rename(target)
        return target

    def mark_best(self, step: int, value: float) -> None:
        """Let `best` point to a checkpoint, and write the metric into its manifest."""
        manifest = Manifest.read(self.path(step))
        if manifest is not None:
            replace(manifest, best=value).write(self.path(step))
            replace_link(self.folder / BEST, self.path(step))

    def best(self) -> tuple[int, float] | None:
        """Return the step and the metric of the best checkpoint; None where there is none."""
        step = self._best_step()
        manifest = Manifest.read(self.path(step)) if step is not None else None
        return None if manifest is None or manifest.best is None else (manifest.step, manifest.best)

    def _best_step(self) -> int | None:
        match = CHECKPOINT.fullmatch((self.folder / BEST).resolve().name)
        return int(match[1]) if match else None

    def clean(self) -> None:
        """Delete the leftovers of killed writers. Only the holder of the lease calls it, before anybody writes.

        A complete checkpoint without its name gets the name: the older checkpoint of its step may be gone.
        """
        if not is_there(self.folder):
            return
        for entry in list(self.folder.iterdir()):
            match = UNFINISHED.match(entry.name)
            if match and not self.path(int(match[1])).exists() and Manifest.read(entry) is not None:
                entry.rename(self.path(int(match[1])))
            elif entry.name.startswith((".step_", ".old.")):
                shutil.rmtree(entry, ignore_errors=True)
        steps = self.steps()
        if steps:
            replace_link(self.folder / LATEST, self.path(steps[0]))
