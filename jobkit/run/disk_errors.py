"""Which errors are those of a disk that is full, read-only or away; worker/reporter.py goes on without one."""

from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path

from jobkit.errors import InputError, JobkitError

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a full, read-only or dead disk answers: trying again at once would not help, later it may."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Those of them that stay until a person makes room; the others may be one node's."""

AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
"""What a file server answers, or its mount says for it, while it is away; or a disk that is dying."""

NO_PATH = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR})
"""What is said of a path that a person has mistyped."""

# What libraries written in Rust, safetensors among them, make of an OSError.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

# What torch.save makes of one, whose number it does not tell: as a rule the disk is full.
_OF_TORCH = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos", re.DOTALL)


def disk_errno(error: BaseException | None) -> int:
    """The number among DISK_ERRORS that an exception, or what caused it, carries; 0 where it is not the disk's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = getattr(error, "errno", None)
        if number is None and (match := _OS_ERROR.search(str(error))):
            number = int(match[1])
        elif number is None and _OF_TORCH.search(str(error)):
            number = errno.ENOSPC
        if number in DISK_ERRORS:
            return int(number)
        error = error.__cause__ or error.__context__
    return 0


def is_full(error: BaseException | None) -> bool:
    """Whether an exception, or what caused it, says that nothing can be written until a person makes room."""
    return disk_errno(error) in FULL


def in_a_line(error: OSError) -> str:
    """What to tell of a file that may not be touched, a disk that refuses or is away; raises any other as it is."""
    if isinstance(error, PermissionError) and error.filename is not None:
        whose = "another user's"
        with contextlib.suppress(OSError, KeyError):
            whose = f"{Path(error.filename).owner()}'s"
        return f"{error.filename}: {error.strerror}: it is {whose}; --runs-dir or JOBKIT_RUNS choose runs of your own"
    where = error.filename2 or error.filename or "the disk"
    if error.errno in FULL:
        return f"{where}: {error.strerror}; make room, and repeat the command"
    if error.errno in AWAY:
        return f"{where}: {error.strerror}; repeat the command when its file system answers again"
    if error.errno in NO_PATH:
        return f"{where}: {error.strerror}"
    raise error


def as_told(error: JobkitError | OSError) -> JobkitError:
    """An error as a command tells it: one of a disk in a line."""
    return error if isinstance(error, JobkitError) else InputError(in_a_line(error))
