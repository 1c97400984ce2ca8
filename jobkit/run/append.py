"""Appending to a file whose disk may be full, read-only or away for a while: no half record, and nothing forgotten."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from jobkit.log import log
from jobkit.run.duration import format_seconds


def append_whole(fd: int, data: bytes, *, durable: bool) -> None:
    """Append `data` to an open file, all of it or nothing; raises OSError when the disk does not take it."""
    before, written = os.fstat(fd).st_size, 0
    try:
        while written < len(data):  # a disk that is just getting full takes a part, and says why the next time
            written += os.write(fd, data[written:])
        if durable:
            os.fsync(fd)  # NFS says only here that the disk is full
    except OSError:
        # A part of a line would run into the next one; another writer's line behind it is not ours to cut.
        with suppress(OSError):
            if os.fstat(fd).st_size == before + written:  # nobody has written since
                os.ftruncate(fd, before)
        raise


class Backlog:
    """Records that wait in memory, in their order, until a disk takes them: at most `limit` bytes, or one record.

    Once there is no room nothing more is kept until all is written: what is missing then is one gap.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting = bytearray()
        self._is_full = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, record: bytes) -> bool:
        """Keep a record; False where there was no room for it."""
        if self._is_full or (self._waiting and len(self._waiting) + len(record) > self.limit):
            self._is_full = True  # until a flush: there is something to flush
            return False
        self._waiting += record
        return True

    def flush(self, write: Callable[[bytes], int | None]) -> None:
        """Let `write` append what waits; it returns how many bytes it has written, None for all, or raises."""
        data = bytes(self._waiting)  # more may be added while this is written
        taken = write(data)
        del self._waiting[: len(data) if taken is None else taken]
        self._is_full = self._is_full and len(self._waiting) > 0

    def clear(self) -> None:
        self._waiting.clear()
        self._is_full = False


class Outage:
    """A time in which something cannot be written: logged once when it begins, and once when it is over."""

    def __init__(self, what: str, meanwhile: str) -> None:
        self.what = what
        self.meanwhile = meanwhile
        self._since: float | None = None

    @contextmanager
    def survived(self) -> Iterator[None]:
        """Go on after an OSError inside: it is part of the outage; without one the outage is over."""
        try:
            yield
        except OSError as error:
            if self._since is None:
                self._since = time.monotonic()
                log.warning("%s cannot be written: %s. %s", self.what, error, self.meanwhile)
        else:
            if self._since is not None:
                log.warning("%s is written again, after %s", self.what, format_seconds(time.monotonic() - self._since))
                self._since = None
