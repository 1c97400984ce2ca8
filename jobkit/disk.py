"""Errors of a disk that is full, read-only or away, and the words for them.

Ranks and the supervisor ask `is_full`: training goes on without such a disk, and tries again, for FULL_DISK_SECONDS
where nothing else can be done meanwhile. Commands that act show `explained`; those that wait look by `Looks`. A program
of ours that meets any other OSError ends with a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from jobkit.errors import InputError, JobkitError
from jobkit.log import log

P = ParamSpec("P")
T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors that stay until a person makes room. Other errors may concern one node only."""

AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.EHOSTUNREACH}
    | {errno.ENOTCONN, errno.ESHUTDOWN}  # FUSE without its program; Lustre after an eviction
)
"""Errors of a file server, or of its mount, while it is away; or of a disk that is dying."""

SILENT_SECONDS = 60.0
"""Looks may fail so long in silence; from then on it is said once in this time."""

MISTYPED = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR})
"""Errors of a path that a person has mistyped."""

FULL_DISK_SECONDS = 300.0
"""How long a job that can only wait for room keeps its nodes: ranks with a state in their memory, or a supervisor
without ranks."""

# Libraries in Rust, safetensors among them, raise an OSError as a text.
_RUST = re.compile(r"\(os error (\d+)\)")


def is_full(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, says that the disk or the quota is full."""
    return _has(error, FULL)


def is_away(error: BaseException) -> bool:
    """Return the same about a disk that is away."""
    return _has(error, AWAY)


def _has(error: BaseException | None, numbers: frozenset[int]) -> bool:
    while error is not None:
        number = getattr(error, "errno", None)
        if number is None and (match := _RUST.search(str(error))):
            number = int(match[1])
        if number in numbers:
            return True
        error = error.__cause__ or error.__context__
    return False


def may_return(error: OSError) -> bool:
    """Return whether a disk that is full or away may take the same bytes later."""
    return is_full(error) or error.errno in AWAY


def explained(error: OSError) -> InputError:
    """The error that a command shows for a disk or a path of the user; raises any other error as it is."""
    if isinstance(error, PermissionError):
        hint = "is it another user's? --runs-dir or JOBKIT_RUNS choose another runs directory"
    elif error.errno in FULL:
        hint = "make room (it may be a quota), and repeat the command"
    elif error.errno in AWAY:
        hint = "repeat the command when the file system answers again"
    elif error.errno in MISTYPED:
        hint = ""
    else:
        raise error
    return InputError(f"{error.strerror}", hint=hint).at(error.filename2 or error.filename or "the disk")


class Looks:
    """The looks of a command that waits: one that a disk lets fail says nothing about a run, and is made again.

    looks = Looks()
    while (status := looks.at(read_status, run)) is None or not status.is_over:
        time.sleep(1)
    """

    def __init__(self) -> None:
        self._began = self._last = -SILENT_SECONDS

    def at(self, look: Callable[P, T], *words: P.args, **options: P.kwargs) -> T | None:
        """Return look(...); None while the disk is away, which is said once a minute. No output belongs into `look`:
        a terminal that is closed fails alike."""
        began = time.monotonic()
        try:
            return look(*words, **options)
        except (OSError, JobkitError) as error:
            if not is_away(error):
                raise
            if began - self._last >= SILENT_SECONDS:  # a new outage
                self._began = began
            self._last = time.monotonic()
            if self._last - self._began >= SILENT_SECONDS:
                self._began = self._last
                log.warning("%s: it is looked at again until the disk answers", error)
            return None


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
