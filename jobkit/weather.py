"""The nature of an error, from its type: may time mend it, another device, or only a person?

    rank or worker: exception --nature_of--> RankReport.nature --> supervisor/retry.py

    program    a type that only a programmer mends: KeyError, an assertion of a kernel
    outside    a disk, a network or a service: ConnectionError, EIO
    hardware   the device says so itself: an uncorrectable memory error
    None       an error as any other

Never from words, which change. torch is not imported for it.
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
import traceback
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

from jobkit.errors import Nature, OutsideError, UsageError

PROGRAM = (
    UsageError,
    TypeError,
    NameError,
    AttributeError,
    LookupError,
    ValueError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    SyntaxError,
)

HALF_READ = (UnicodeError, json.JSONDecodeError)
"""ValueErrors that a file gives which somebody else is writing."""

OUTSIDE = (OutsideError, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)

NUMBERS = frozenset(
    number
    for name, number in vars(errno).items()
    if name in ("EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "ENOTCONN", "ENXIO", "ENODEV")
    or name.startswith(("ECONN", "ENET", "EHOST"))
)

HTTP = frozenset({"requests", "urllib", "urllib3", "http", "httpx", "httpcore", "aiohttp"})
"""Packages whose errors say what a server does, without a number."""

ASSERT, HARDWARE = 710, frozenset({46, 214, 220, 226, 802})
"""Codes of CUDA: device-side assert; devices unavailable, ECC, NVLink, contained error, system not ready. Not 101 and
999, which are a user's as often."""

_NOT_THE_USERS = (Path(get_path("stdlib")), Path(get_path("purelib")), Path(__file__).parent)


def nature_of(error: BaseException) -> Nature | None:
    """Return the nature of an error: the outermost of its chain that has one."""
    return next(filter(None, map(_nature, chain_of(error))), None)


def _nature(error: BaseException) -> Nature | None:
    if isinstance(error, OUTSIDE):  # before ValueError: a certificate's error is both
        return "outside"
    if isinstance(error, PROGRAM):
        return None if isinstance(error, HALF_READ) else "program"
    if any(kind.__module__.partition(".")[0] in HTTP for kind in type(error).__mro__):
        return "outside"
    if isinstance(error, OSError):
        return "outside" if error.errno in NUMBERS else None
    code = getattr(error, "error_code", None) if type(error).__name__ == "AcceleratorError" else None
    return "program" if code == ASSERT else "hardware" if code in HARDWARE else None


def chain_of(error: BaseException | None, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes; those that it hides (`raise ... from None`) where `hidden` is True."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ and not hidden else error.__context__)


def place_of(error: BaseException) -> str:
    """Return the type and the innermost line of the user's own code, as in `KeyError at train.py:41`."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not _is_of_a_library(Path(frame.filename))]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{where}"


def _is_of_a_library(file: Path) -> bool:
    return file.name.startswith("<") or any(file.is_relative_to(folder) for folder in _NOT_THE_USERS)
