"""Errors of a disk that is full, read-only or away, and the words for them.

Ranks and the supervisor ask `is_full`: training goes on without such a disk, and tries again. Commands show
`explained`. A program of ours that meets any other OSError ends with a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from jobkit.errors import InputError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors that stay until a person makes room. Other errors may concern one node only."""

AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
"""Errors of a file server, or of its mount, while it is away; or of a disk that is dying."""

_OF_DISKS = FULL | {errno.EIO, errno.ESTALE}
"""Errors that nothing but a disk causes; a socket has the others of AWAY, too."""

_MISTYPED = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR})
"""Errors of a path that a person has mistyped."""

# Libraries in Rust, safetensors among them, raise an OSError as a text.
_RUST = re.compile(r"\(os error (\d+)\)")


def disk_errno(error: BaseException | None) -> int:
    """The error number of a disk that an exception, or one of its causes, carries; 0 if no disk is to blame."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = getattr(error, "errno", None)
        if number is None and (match := _RUST.search(str(error))):
            number = int(match[1])
        if number in _OF_DISKS:
            return int(number)
        error = error.__cause__ or error.__context__
    return 0


def is_full(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, says that nothing can be written until a person makes room."""
    return disk_errno(error) in FULL


def explained(error: OSError) -> InputError:
    """The error that a command shows for a disk or a path of the user; raises any other error as it is."""
    path = error.filename2 or error.filename or "the disk"
    if isinstance(error, PermissionError):
        hint = f"it belongs to {_owner(Path(path))}; --runs-dir or JOBKIT_RUNS choose another runs directory"
    elif error.errno in FULL:
        hint = f"make room, and repeat the command{_free_words(Path(path))}"
    elif error.errno in AWAY:
        hint = "repeat the command when the file system answers again"
    elif error.errno in _MISTYPED:
        hint = ""
    else:
        raise error
    return InputError(f"{error.strerror}", hint=hint).at(path)


def write_probe(folder: Path) -> OSError | None:
    """The error that a small durable file meets in a folder; None if it can be written.

    The folder may have room for an empty file and none for a byte: blocks and inodes have limits of their own.
    """
    file = folder / f".probe.{os.getpid()}.tmp"
    try:
        with file.open("wb") as opened:
            opened.write(bytes(64 << 10))
            opened.flush()
            os.fsync(opened.fileno())  # NFS and quotas answer only now
        file.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only disk refuses this too
            file.unlink(missing_ok=True)
        return error
    return None


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):
        return "another user"


def _free_words(path: Path) -> str:
    try:
        free = shutil.disk_usage(path if path.exists() else path.parent).free
    except OSError:
        return ""
    return f" ({free / 2**30:.1f} GiB are free there: it may be a quota)" if free > 2**20 else ""
