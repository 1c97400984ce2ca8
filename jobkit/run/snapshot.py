"""A copy of the user's code for each submission, so that what runs is what was submitted, requeues included."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from jobkit.run.files import read_json, write_json

MANIFEST = ".snapshot.json"


def scan(source: Path, names: Iterable[Path]) -> dict[str, str]:
    """File name -> digest of its content, of files below `source`."""
    return {str(name): _digest(source / name) for name in names}


def take(source: Path, files: Mapping[str, str], code_dir: Path) -> str:
    """Copy scanned files into `code_dir/<digest>` and return the digest (12 hex digits of their names and contents).

    What is a link in `source` is a file in the copy. The same code is stored once.
    """
    listed = "\n".join(f"{name} {files[name]}" for name in sorted(files))
    digest = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()[:12]
    destination = code_dir / digest
    if destination.exists():
        return digest
    # Beside the others under a name of its own: two submissions of one run may copy at the same time.
    staging = code_dir / f".{digest}.{os.getpid()}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for folder in {staging / Path(name).parent for name in files}:
        folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copyfile(source / name, staging / name)
        if _is_program(source / name):
            (staging / name).chmod((staging / name).stat().st_mode | 0o111)
    write_json(staging / MANIFEST, files, durable=False)
    staging.rename(destination)  # last: a snapshot is complete or not there
    return digest


def verify(code_dir: Path, digest: str) -> list[str]:
    """What a crash or a hand has changed in a snapshot, as lines: an attempt refuses it instead of training with it."""
    root = code_dir / digest
    files = read_json(root / MANIFEST)
    if not isinstance(files, dict):
        return [f"{root}: no snapshot"]
    return [
        f"{root / name}: not as it was submitted"
        for name, expected in files.items()
        if not (root / name).is_file() or not expected.startswith(_digest_of_content(root / name))
    ]


def changes(code_dir: Path, old: str, after: Mapping[str, str]) -> list[str]:
    """How scanned files differ from a snapshot, as `+ added`, `- removed` and `~ changed` lines."""
    before = read_json(code_dir / old / MANIFEST) or {}
    lines = [f"+ {name}" for name in after if name not in before]
    lines += [f"- {name}" for name in before if name not in after]
    lines += [f"~ {name}" for name in after if name in before and after[name] != before[name]]
    return sorted(lines, key=lambda line: line[2:])


def _digest(file: Path) -> str:
    """Of its content, and of whether it can be executed: a program that could not would be taken from elsewhere."""
    return _digest_of_content(file) + ("x" if _is_program(file) else "")


def _digest_of_content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _is_program(file: Path) -> bool:
    return bool(file.stat().st_mode & stat.S_IXUSR)
