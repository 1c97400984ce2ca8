"""A copy of the user's code for each submission, so that what runs is what was submitted, requeues included."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run.files import read_json, write_json

_SUFFIXES = ".py .pyi .pyx .c .cc .cpp .cu .cuh .h .hpp .sh .yaml .yml .json .toml .cfg .ini .txt .j2"
SOURCE_SUFFIXES = frozenset(_SUFFIXES.split())
"""Of files that count as code where no git says what does."""

MAX_FILE_BYTES = 2 << 20
"""A bigger file is data, not code."""

MAX_FILES = 5000
"""More are no project's folder but a home directory, which a submission would copy for minutes."""

MANIFEST = ".snapshot.json"


def scan(source: Path, skip: Path, needed: Path | None = None) -> dict[str, str]:
    """What `take` would copy: file name -> digest of its content."""
    return {str(file): _digest(source / file) for file in _list(source, skip, needed)}


def take(source: Path, code_dir: Path, skip: Path, needed: Path | None = None) -> str:
    """Copy the code under `source` into `code_dir/<digest>` and return the digest (12 hex digits of its content).

    In a git checkout: the files git tracks or would (not the ignored ones, unless `needed` is one of them); elsewhere:
    files that look like source. Nothing below `skip` (the runs directory) is copied. The same code is stored once.
    Raises InputError when there are too many files for this to be a project's folder.
    """
    files = scan(source, skip, needed)
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
        if not (root / name).is_file() or _digest(root / name) != expected
    ]


def changes(code_dir: Path, old: str, after: Mapping[str, str]) -> list[str]:
    """How scanned files differ from a snapshot, as `+ added`, `- removed` and `~ changed` lines."""
    before = read_json(code_dir / old / MANIFEST) or {}
    lines = [f"+ {name}" for name in after if name not in before]
    lines += [f"- {name}" for name in before if name not in after]
    lines += [f"~ {name}" for name in after if name in before and after[name] != before[name]]
    return sorted(lines, key=lambda line: line[2:])


def _list(source: Path, skip: Path, needed: Path | None) -> list[Path]:
    found = _git_files(source)
    if found is None or (needed is not None and needed not in found):
        found = list(_walk(source, skip))
    kept = []
    for file in sorted(found):
        full = source / file
        if skip not in full.parents and full.is_file() and full.stat().st_size <= MAX_FILE_BYTES:
            kept.append(file)
    if len(kept) > MAX_FILES:
        raise InputError(f"{source}: more than {MAX_FILES} code files; run the command in the project's own folder")
    return kept


def _git_files(source: Path) -> list[Path] | None:
    """Tracked and would-be-tracked files below `source`, or None where git does not answer for it."""
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=20, check=False)  # a cold shared disk
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else [Path(name) for name in os.fsdecode(answer.stdout).split("\0")[:-1]]


def _walk(source: Path, skip: Path) -> Iterator[Path]:
    seen = 0
    for folder, subfolders, names in os.walk(source):
        here = Path(folder)
        subfolders[:] = [
            one
            for one in subfolders
            if not one.startswith((".", "__pycache__", "node_modules"))
            and here / one != skip
            and not (here / one / "pyvenv.cfg").exists()  # a virtual environment
        ]
        seen += len(names)
        if seen > 20 * MAX_FILES:
            where = "run the command in the project's own folder"
            raise InputError(f"{source}: too many files to look for code in; {where}")
        yield from ((here / one).relative_to(source) for one in names if Path(one).suffix in SOURCE_SUFFIXES)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
