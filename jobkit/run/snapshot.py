"""A copy of the user's code for each submission, so that what runs is what was submitted, requeues included."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run.code_files import is_program
from jobkit.run.files import read_json, write_json

MANIFEST = ".snapshot.json"

SCANS = 3
"""How often a submission reads code that changes meanwhile."""


@dataclass(frozen=True)
class Difference:
    """A file of a snapshot that is not as it was copied."""

    file: Path
    what: str
    is_program: bool
    """Whether another text of it could do other work: an attempt refuses that, and tells of the rest."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def scan(source: Path, names: Iterable[Path]) -> dict[str, str]:
    """File name -> digest of its content, of files below `source`; one that is gone by now is left out."""
    files = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            files[str(name)] = _digest(source / name)
    return files


def take(source: Path, files: Mapping[str, str], code_dir: Path) -> str:
    """Copy scanned files into `code_dir/<digest>` and return the digest (12 hex digits of their names and contents).

    What is a link in `source` is a file in the copy. The same code is stored once; a copy that does not verify any more
    is replaced. What was saved since the scan is scanned again. Raises InputError where that has no end.
    """
    for _ in range(SCANS):
        destination = code_dir / _digest_of_all(files)
        if destination.exists() and not verify(code_dir, destination.name):
            return destination.name
        # Beside the others under a name of its own: two submissions of one run may copy at the same time.
        staging = code_dir / f".{destination.name}.{os.getpid()}.tmp"
        copied = _copy(source, files, staging)
        changed = [name for name in files if copied.get(name) != files[name]]
        if not changed:
            _publish(staging, destination)
            return destination.name
        shutil.rmtree(staging)
        files = {name: digest for name in files if (digest := copied.get(name)) is not None}
    what = f"the code changes while it is copied: {source / changed[0]}"
    raise InputError(f"{what}; submit again when nothing writes to it, or let git ignore what is no code")


def verify(code_dir: Path, digest: str) -> list[Difference]:
    """What a crash, a hand or the run itself has changed in a snapshot."""
    root = code_dir / digest
    files = read_json(root / MANIFEST, fresh=True)
    if not isinstance(files, dict):
        return [Difference(root, "no snapshot", is_program=True)]
    return [
        Difference(root / name, "not as it was submitted", is_program=is_program(name) or expected.endswith("x"))
        for name, expected in files.items()
        if not (root / name).is_file() or not expected.startswith(_digest_of_content(root / name))
    ]


def _copy(source: Path, files: Iterable[str], folder: Path) -> dict[str, str]:
    """Copy files with a manifest of them; returns the digests of the copies, without those that are gone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for parent in {folder / Path(name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    copied = {}
    for name in files:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source / name, folder / name)
            can_be_executed = _can_be_executed(source / name)
            mode = (folder / name).stat().st_mode | (0o111 if can_be_executed else 0)
            # Not more than for the file itself: it may be a token's that only its owner may read.
            (folder / name).chmod(mode & ((source / name).stat().st_mode | 0o700))
            copied[name] = _digest_of_content(folder / name) + ("x" if can_be_executed else "")
    write_json(folder / MANIFEST, copied, durable=False)
    return copied


def _publish(staging: Path, destination: Path) -> None:
    """Rename a copy that is complete; one that is there and does not verify goes aside, and away."""
    aside = staging.with_suffix(".old")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        destination.rename(aside)
    try:
        staging.rename(destination)
    except OSError:
        with contextlib.suppress(OSError):
            aside.rename(destination)
        raise
    if aside.is_symlink():  # to one that several runs had
        aside.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def changes(code_dir: Path, old: str, after: Mapping[str, str]) -> list[str]:
    """How scanned files differ from a snapshot, as `+ added`, `- removed` and `~ changed` lines.

    Raises InputError where the snapshot is gone, so that nobody can tell.
    """
    before = read_json(code_dir / old / MANIFEST)
    if not isinstance(before, dict):
        is_shared = (code_dir / old).is_symlink()
        why = ", as after a run of a sweep was moved out of its runs directory" if is_shared else ""
        raise InputError(f"{(code_dir / old).resolve()} is gone, the code of the submission before{why}")
    lines = [f"+ {name}" for name in after if name not in before]
    lines += [f"- {name}" for name in before if name not in after]
    lines += [f"~ {name}" for name in after if name in before and after[name] != before[name]]
    return sorted(lines, key=lambda line: line[2:])


def written_by_run(source: Path, changed: Iterable[str], while_running: Iterable[tuple[float, float]]) -> list[str]:
    """Of the lines of `changes` those of files that are no programs, and were last written while the run trained.

    `while_running` are (start, end) of its attempts, in seconds since the epoch. A person may have written one then:
    these are probably the run's own outputs, no more.
    """
    spans, found = list(while_running), []
    for line in changed:
        name = line[2:]
        with contextlib.suppress(OSError):
            at = (source / name).stat().st_mtime
            if not is_program(name) and any(start <= at <= end for start, end in spans):
                found.append(line)
    return found


def _digest_of_all(files: Mapping[str, str]) -> str:
    listed = "\n".join(f"{name} {files[name]}" for name in sorted(files))
    return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()[:12]


def _digest(file: Path) -> str:
    """Of its content, and of whether it can be executed: a program that could not would be taken from elsewhere."""
    return _digest_of_content(file) + ("x" if _can_be_executed(file) else "")


def _digest_of_content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _can_be_executed(file: Path) -> bool:
    return bool(file.stat().st_mode & stat.S_IXUSR)
