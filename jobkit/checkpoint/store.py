"""The directory of checkpoints: each one complete or absent, checked against its checksums, the newest few kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import CheckpointError
from jobkit.log import log
from jobkit.run.files import foreign_owner, fsync_dir, fsync_file, is_there, write_json
from jobkit.run.identity import Owner

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"

_STEP = re.compile(r"step_(\d{8,})")
_STAGING, _TRASH, _REPLACED = ".staging_", ".trash_", ".replaced_"
_BLOCK = 256 << 10  # stays in a processor's own cache between the read and the checksum


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and CRC-32 of one file of a checkpoint."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; `extra` is the caller's own JSON."""

    step: int
    world_size: int
    files: dict[str, FileDigest]
    extra: dict[str, Any] = field(default_factory=dict)
    owner: Owner = field(default_factory=Owner)

    def to_json(self) -> dict[str, Any]:
        """The JSON value that `from_json` reads, with the format's version and a checksum over the rest."""
        body = {"format": FORMAT, **asdict(self)}
        return {**body, "checksum": _checksum(body)}

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """The manifest of a JSON value; ValueError where it is not one that `to_json` made."""
        if not isinstance(value, dict):
            raise ValueError("is not an object")
        body = {key: item for key, item in value.items() if key != "checksum"}
        if value.get("checksum") != _checksum(body):
            raise ValueError("does not match its own checksum")
        if body["format"] != FORMAT:
            raise ValueError(f"has format {body['format']}; this version of jobkit reads format {FORMAT}")
        files = {name: FileDigest(**digest) for name, digest in body["files"].items()}
        owner = Owner(**body.get("owner", {}))  # one of an older jobkit has none
        return cls(body["step"], body["world_size"], files, body["extra"], owner)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def not_of(owner: Owner, manifest: Manifest, path: Path) -> str | None:
    """What to tell where a checkpoint is another run's."""
    if not manifest.owner.is_other_than(owner):
        return None
    of = manifest.owner.run
    return (
        f"{path} is a checkpoint of {of}, which computes something else than {owner.run}: take it away again; a run "
        f"that starts from it: --from {of}@{manifest.step}"
    )


class Store:
    """The checkpoints under `root`; a step in a name is the number of steps done.

    `attempt` keeps the unfinished files of two attempts apart. `missing_seconds` is for how long a missing file is
    looked for again: NFS may show it late to other hosts than the one that made it.
    """

    def __init__(self, root: Path, *, attempt: str = "0", missing_seconds: float = 5.0) -> None:
        self.root = Path(root)
        self.attempt = attempt
        self.missing_seconds = missing_seconds

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.root / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first, not yet verified."""
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)

    def has(self, step: int) -> bool:
        """Whether a step has a checkpoint, not yet verified."""
        return is_there(self.path(step) / MANIFEST)

    # Writing

    def staging(self, step: int) -> Path:
        """Where this attempt puts the files of a checkpoint together."""
        return self.root / f"{_STAGING}{self.path(step).name}.{self.attempt}"

    def stage(self, step: int) -> Path:
        """Make an empty staging directory."""
        staging = self.staging(step)
        _remove(staging)
        staging.mkdir(parents=True)
        return staging

    def staged(self, step: int) -> Path:
        """The staging directory that rank 0 has made; CheckpointError where this rank does not see it."""
        staging = self.staging(step)
        if not self._appears(staging, time.monotonic() + self.missing_seconds):
            raise CheckpointError(f"{staging} is missing here: do all ranks write to the same disk?")
        return staging

    def publish(self, manifest: Manifest) -> Path:
        """Make the staged files the checkpoint of their step; they are on the disk already, their names may not be.

        Raises CheckpointError where one of them is not to be seen here.
        """
        staging, final = self.staging(manifest.step), self.path(manifest.step)
        self._check_is_whole(staging, manifest)
        replaced = self.root / f"{_REPLACED}{final.name}"
        write_json(staging / MANIFEST, manifest.to_json())  # before the rename: a checkpoint without one is damaged
        if final.exists():
            _remove(replaced)
            final.rename(replaced)  # a crash before the next line is what `recover` is for
        try:
            staging.rename(final)
        except OSError:
            self.recover()
            raise
        fsync_dir(self.root)
        self._point_latest()
        _remove(replaced)  # only once the new name is on the disk: until then it is the only one that surely is
        return final

    def take_over(self, other: Store, step: int) -> Path:
        """Have another store's checkpoint here too, whole or not at all: linked, or copied where there can be no links.

        Raises CheckpointError where it is not whole, OSError where the disk does not take it.
        """
        manifest = other.manifest(step)
        staging = self.stage(step)
        try:
            for name in manifest.files:
                _link_or_copy(other.path(step) / name, staging / name, self.root)
            for folder in {(staging / name).parent for name in manifest.files}:
                fsync_dir(folder)
            for name, digest in manifest.files.items():
                if problem := self._problem(staging / name, digest, 0.0):
                    raise CheckpointError(problem)
            return self.publish(manifest)
        finally:
            self.discard_staging(step)

    def _check_is_whole(self, staging: Path, manifest: Manifest) -> None:
        """Raise CheckpointError unless all files are here with their sizes: a rank may have written to another disk."""
        deadline = time.monotonic() + self.missing_seconds
        for name, digest in manifest.files.items():
            if not self._appears(staging / name, deadline):
                raise CheckpointError(f"{name} is missing in {staging}: do all ranks write to the same disk?")
            with (staging / name).open("rb") as file:  # opened: only then does NFS ask its server for the size
                size = os.fstat(file.fileno()).st_size
            if size != digest.size:
                raise CheckpointError(f"{name} has {size} bytes, not {digest.size}")

    def _point_latest(self) -> None:
        latest, temporary = self.root / LATEST, self.root / f".{LATEST}.{self.attempt}"
        try:
            steps = self.steps()
            if not steps:
                latest.unlink(missing_ok=True)
                return
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.path(steps[0]).name)
            temporary.replace(latest)
        except OSError as error:  # a convenience for people: nothing reads it, some file systems have no links
            log.warning("cannot point %s to the newest checkpoint: %s", latest, error)
            _remove(temporary)

    # Removing

    def retain(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` (at least one) and return the steps removed."""
        removed = self.steps()[max(keep, 1) :]
        for step in removed:
            trash = self.root / f"{_TRASH}{self.path(step).name}.{self.attempt}"
            _remove(trash)
            self.path(step).rename(trash)  # never half a checkpoint under a name that counts
            _remove(trash)
        return removed

    def set_aside(self, step: int, reason: str) -> Path:
        """Leave the reason in a checkpoint and rename it so that it is never considered again."""
        source = self.path(step)
        target = source.with_name(f"{source.name}.corrupt")
        number = 2
        while target.exists():
            target, number = source.with_name(f"{source.name}.corrupt-{number}"), number + 1
        try:
            # First: no crash leaves one set aside without a reason.
            (source / "REASON").write_text(reason + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            log.warning("cannot write the reason into %s: %s", source, error)
        source.rename(target)
        fsync_dir(self.root)
        self._point_latest()
        return target

    def move_away(self, step: int, folder: Path) -> None:
        """Have a checkpoint in another folder of the same disk: it is not considered any more."""
        self.path(step).rename(folder / self.path(step).name)
        fsync_dir(self.root)
        self._point_latest()

    def discard_staging(self, step: int) -> None:
        """Remove what a failed save of this attempt left."""
        _remove(self.staging(step))

    def recover(self) -> None:
        """Bring back checkpoints that were moved away for a new one of the same step which never came."""
        for replaced in self._hidden(_REPLACED):
            final = replaced.with_name(replaced.name[len(_REPLACED) :])
            if not final.exists():
                replaced.rename(final)
                fsync_dir(self.root)

    def clean(self) -> None:
        """Remove what dead attempts left unfinished. Only for the one owner of the run: it may not be writing yet."""
        self.recover()
        links = self.root.glob(f".{LATEST}.*")
        for leftover in [*self._hidden(_REPLACED), *self._hidden(_STAGING), *self._hidden(_TRASH), *links]:
            _remove(leftover)
        self._point_latest()

    def _hidden(self, prefix: str) -> list[Path]:
        return sorted(self.root.glob(f"{prefix}step_*"))

    # Verifying

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint; CheckpointError says what is wrong with it."""
        path = self.path(step) / MANIFEST
        try:
            if not self._appears(path, time.monotonic() + self.missing_seconds):
                raise CheckpointError(f"{MANIFEST} is missing")
            manifest = Manifest.from_json(json.loads(path.read_bytes()))
        except PermissionError:
            raise
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{MANIFEST} is not valid: {error}") from error
        if manifest.step != step:
            raise CheckpointError(f"{MANIFEST} is that of step {manifest.step}")
        return manifest

    def foreign(self, owner: Owner) -> str | None:
        """What to tell of a checkpoint here that another run wrote; None where there is none.

        One that cannot be read is left to whoever would load it.
        """
        for step in self.steps():
            with contextlib.suppress(CheckpointError, OSError):
                if (problem := not_of(owner, self.manifest(step), self.path(step))) is not None:
                    return problem
        return None

    def verify(self, step: int, files: Iterable[str] | None = None, manifest: Manifest | None = None) -> list[str]:
        """What is wrong with a checkpoint, or with some of its files: a sentence each, none where all is well.

        PermissionError is raised, not returned: it tells of this machine and not of the checkpoint.
        """
        try:
            manifest = manifest or self.manifest(step)
        except CheckpointError as error:
            return [str(error)]
        deadline = time.monotonic() + self.missing_seconds
        problems = [
            self._problem(self.path(step) / name, manifest.files[name], deadline)
            for name in (manifest.files if files is None else files)
        ]
        return [problem for problem in problems if problem]

    def _problem(self, path: Path, expected: FileDigest, deadline: float) -> str | None:
        try:
            if not self._appears(path, deadline):
                return f"{path.name} is missing"
            if owner := foreign_owner(path, self.root):  # objects in it are unpickled
                return f"{path.name} is not its run's owner's, but {owner}'s"
            found = digest_of(path)
        except PermissionError:
            raise
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror}"
        if found.size != expected.size:
            return f"{path.name} has {found.size} bytes, not {expected.size}"
        if found.crc32 != expected.crc32:
            return f"{path.name} has checksum {found.crc32:08x}, not {expected.crc32:08x}"
        return None

    def _appears(self, path: Path, deadline: float) -> bool:
        while not is_there(path):
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(0.1, self.missing_seconds))
        return True


def _remove(path: Path) -> None:
    """Remove a directory, or what damage put in its place; what cannot be removed is left to the next `clean`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _link_or_copy(source: Path, target: Path, folder: Path) -> None:
    """A file's second name, or a copy: on another disk, or where it is another user's, who may write to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if foreign_owner(source, folder) is None:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    fsync_file(target)


def digest_of(path: Path) -> FileDigest:
    """Size and checksum of a file, read once."""
    size = crc = 0
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = zlib.crc32(block[:count], crc)
            size += count
    return FileDigest(size, crc)
