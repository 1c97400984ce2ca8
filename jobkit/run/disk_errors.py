"""Which errors are those of a disk that is full, read-only or away; worker/reporter.py goes on without one."""

from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a full, read-only or dead disk answers: trying again at once would not help, later it may."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Those of them that stay until a person makes room; the others may be one node's."""

# What libraries written in Rust, safetensors among them, make of an OSError.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def disk_errno(error: BaseException | None) -> int:
    """The number among DISK_ERRORS that an exception, or what caused it, carries; 0 where it is not the disk's."""
    while error is not None:
        number = getattr(error, "errno", None)
        if number is None and (match := _OS_ERROR.search(str(error))):
            number = int(match[1])
        if number in DISK_ERRORS:
            return int(number)
        error = error.__cause__ or error.__context__
    return 0


def is_full(error: BaseException | None) -> bool:
    """Whether an exception, or what caused it, says that nothing can be written until a person makes room."""
    return disk_errno(error) in FULL


def in_a_line(error: OSError) -> str:
    """What to tell of a file that may not be touched, or of a disk that refuses; raises any other error as it is."""
    if isinstance(error, PermissionError) and error.filename is not None:
        whose = "another user's"
        with contextlib.suppress(OSError, KeyError):
            whose = f"{Path(error.filename).owner()}'s"
        return f"{error.filename}: {error.strerror}: it is {whose}; --runs-dir or JOBKIT_RUNS choose runs of your own"
    if error.errno in FULL:
        return f"{error.filename2 or error.filename or 'the disk'}: {error.strerror}; make room, and repeat the command"
    raise error
