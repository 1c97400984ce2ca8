"""A claim on a file: one writer at a time, on any file system that several hosts share."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jobkit.run.files import FOR_ALL
from jobkit.run.processes import is_gone, named

ABANDONED_SECONDS = 30.0
"""How long a claim that does not change is respected. An fsync on a busy NFS server may take most of it; only a host
that dies within an append, or a process that is stopped there, makes others wait for it."""

WAIT_SECONDS = 120.0
"""How long a writer waits in all; after that the file system is at fault."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.1
"""Between two tries, in seconds: on NFS each is a request."""

LONGEST_LOOK = 1.0
"""What counts at most of the seconds between two looks: who was cut off or suspended has not watched meanwhile."""

_JITTER = random.SystemRandom()
"""Not Python's own generator: rank 0 journals in the process that trains, and that one is part of a checkpoint."""

_CANNOT = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Why there may be no claim while there is room for a line: a directory takes a block and an inode."""


class Claim:
    """A turn to write, which began before `taken`, by the monotonic clock."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def may_be_lost(self) -> bool:
        """Whether this process has stood still for so long that others take the claim for abandoned, or soon will."""
        return time.monotonic() - self.taken > ABANDONED_SECONDS / 2


@contextmanager
def claimed(path: Path) -> Iterator[Claim]:
    """Hold the claim on a file; raises OSError where it cannot be had within WAIT_SECONDS.

    The claim is a directory beside the file, with one file in it that is named after its holder. It is taken by
    renaming a directory made beforehand, which replaces no other but an empty one, on NFS too. It is released, and
    taken away from a holder that is gone, by removing that file by its name, which no other holder's ever has.
    """
    token = _token()
    claim = path.with_name(f"{path.name}.claim")
    prepared = path.with_name(f".{path.name}.claim.{token}")
    try:
        if _prepare(prepared, token):
            yield Claim(_take(claim, prepared, token))
        else:
            with _locked(path):
                yield Claim(time.monotonic())
    finally:
        _remove(prepared, token)
        _remove(claim, token)


def _prepare(prepared: Path, token: str) -> bool:
    """Make the directory that becomes the claim; False where the file system cannot hold it."""
    try:
        prepared.mkdir()
        (prepared / token).touch()
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _take(claim: Path, prepared: Path, token: str) -> float:
    """Wait for the claim; returns when it cannot have been taken before, by the monotonic clock."""
    deadline, pause, watch = time.monotonic() + WAIT_SECONDS, SHORTEST_PAUSE, _Watch()
    while True:
        now = time.monotonic()
        if _is_taken(claim, prepared, token):
            return now
        holder = _holder(claim)
        if holder is not None and (
            is_gone(holder.rpartition("_")[0]) or watch.seconds(holder, now) > ABANDONED_SECONDS
        ):
            with suppress(FileNotFoundError):  # removed by somebody else
                (claim / holder).unlink()
            watch = _Watch()
        elif now > deadline:
            raise OSError(errno.ETIMEDOUT, f"still claimed by {holder} after {WAIT_SECONDS:.0f} s", str(claim))
        else:
            time.sleep(_JITTER.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE)


def _is_taken(claim: Path, prepared: Path, token: str) -> bool:
    try:
        prepared.rename(claim)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not claim.exists():
            raise
        return (claim / token).exists()  # NFS repeats a rename whose answer was lost, and then says that it failed
    return True


def _holder(claim: Path) -> str | None:
    """The name of who holds a claim; None where it is free."""
    try:
        holder = next(claim.iterdir(), None)
        if holder is None:  # of a holder that died between the two steps of its release
            claim.rmdir()
    except OSError:  # released, or taken again, just now
        return None
    return None if holder is None else holder.name


def _remove(directory: Path, token: str) -> None:
    with suppress(OSError):
        (directory / token).unlink()
    with suppress(OSError):
        directory.rmdir()  # fails where it is another holder's: that is not empty


class _Watch:
    """How long a claim has not changed, by the clock of who looks at it."""

    def __init__(self) -> None:
        self._holder, self._looked, self._seconds = "", 0.0, 0.0

    def seconds(self, holder: str, now: float) -> float:
        """The seconds for which this holder has been seen; called at each look."""
        if holder != self._holder:
            self._holder, self._seconds = holder, 0.0
        else:
            self._seconds += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self._seconds


def _token() -> str:
    """A name for one turn of this thread: which process it is of, and a nonce."""
    return f"{named(os.getpid())}_{secrets.token_hex(4)}"


# A file system without room for a claim


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the kernel's lock on a file, which processes of one host respect, and on most NFS those of others."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, FOR_ALL)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _is_locked(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"still locked after {WAIT_SECONDS:.0f} s", str(path))
            time.sleep(LONGEST_PAUSE)
        yield
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # it knows no locks: a whole line at a time is what is left
    return True
