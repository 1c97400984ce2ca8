"""The one way jobkit writes a file: whole or not at all, and on the disk before anything refers to it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def fsync_dir(path: Path) -> None:
    """Make the entries of a directory (a rename, a new file) durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace `path` with `data`: a reader, or a crash at any instant, sees the old file or the new one.

    `durable=False` skips the fsync: for files that are only a view of something durable, like a progress report.
    """
    with replacing(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` when all of it is there; as `write_atomic`, for what comes in parts."""
    # Two hosts of one cluster may share a pid, and two threads one process: the temporary's name holds all three.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
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


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` of a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None where there is no such file or it is not whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
