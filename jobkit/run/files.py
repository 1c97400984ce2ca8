"""The one way jobkit writes a file: whole or not at all, and on the disk before anything refers to it."""

from __future__ import annotations

import json
import os
import pwd
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO


def fsync_file(path: Path) -> None:
    """Make a file durable that somebody else has written; its name is an entry of its directory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Make the entries of a directory (a rename, a new file) durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


FOR_ALL = 0o666
"""Permissions of a file, of which the umask takes away what its user wants to keep."""

FOR_OWNER = 0o600


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True, mode: int = FOR_ALL) -> None:
    """Replace `path` with `data`: a reader, or a crash at any instant, sees the old file or the new one.

    `durable=False` skips the fsync: for files that are only a view of something durable, like a progress report.
    `mode`, less the umask, are its permissions from the first instant on.
    """
    with replacing(path, durable=durable, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = FOR_ALL) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` when all of it is there; as `write_atomic`, for what comes in parts."""
    # Two hosts of one cluster may share a pid, and two threads one process: the temporary's name holds all three.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process of that number which was killed: its permissions may be others
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)  # after the fsync: else a crash may leave the new name with no content
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)  # a rename is an entry of the directory, which the file's own fsync does not reach


def replace_link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, by a relative way, whatever is there; not durable by itself."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent))
    temporary.replace(path)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` of a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n", durable=durable)


def read_json(path: Path, *, fresh: bool = False) -> Any:
    """The value of a JSON file, or None where there is no such file or it is not whole; `fresh` as by read_fresh."""
    try:
        return json.loads(read_fresh(path) if fresh else path.read_bytes())
    except (OSError, ValueError):
        return None


# What another host has just made


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder, be it that another host has made it a moment ago.

    NFS remembers for 30 to 60 s that there was none, unless the folder that it should be in is read again.
    """
    if path.exists():
        return True
    _read_again(path.parent)
    return path.exists()


def read_fresh(path: Path) -> bytes:
    """What is in a file, which is looked for as by `is_there`; raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        _read_again(path.parent)
        return path.read_bytes()


def _read_again(folder: Path) -> None:
    """Let NFS ask the server what is in a folder; that folder itself may be as new."""
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
    except FileNotFoundError:
        if folder.parent != folder:
            _read_again(folder.parent)
    except OSError:  # the look that follows says why
        return


# Who has written a file


def foreign_owner(path: Path, folder: Path) -> str | None:
    """Who wrote a file, where that was neither this user nor the owner of a folder; None where it was. Raises OSError.

    For what would run code when it is read: whoever else may write in the folder could have put it there.
    """
    owner = path.stat().st_uid
    if owner in (os.geteuid(), folder.stat().st_uid):
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


def files_below(folder: Path) -> Iterator[Path]:
    """All files of a folder and of those in it, but what begins with a dot; links are followed, to nothing twice."""
    state = folder.stat()
    seen = {(state.st_dev, state.st_ino)}
    for parent, folders, files in os.walk(folder, followlinks=True):
        # Links come last: what one leads to is found by its own name where it is here.
        below = sorted((path.is_symlink(), path) for path in (Path(parent, name) for name in folders))
        folders.clear()
        for _, path in below:
            state = path.stat()
            if not path.name.startswith(".") and (state.st_dev, state.st_ino) not in seen:
                seen.add((state.st_dev, state.st_ino))
                folders.append(path.name)
        yield from (Path(parent, file) for file in files if not file.startswith("."))


def content_digest(*files: Path) -> str:
    """64 hex digits (SHA-256) of what is in some files, one after the other; raises OSError."""
    import hashlib  # here: most commands need none

    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            for piece in iter(partial(opened.read, 1 << 24), b""):
                found.update(piece)
    return found.hexdigest()
