"""What a rank prints, into a log file that may be on a full disk: a print() is no reason to lose a training."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from typing import Any, TextIO

from jobkit.run.append import Backlog
from jobkit.run.disk_errors import disk_errno


def survive_full_disks() -> None:
    """Let sys.stdout and sys.stderr take what the disk does not; the rest of them stays as it is."""
    sys.stdout = _retrying(sys.stdout)
    sys.stderr = _retrying(sys.stderr)


def _retrying(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # something else has taken its place already
    with contextlib.suppress(OSError):
        stream.flush()
    raw: Any = RetryingFile(stream.fileno(), stream.name)
    retrying = io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),  # the one under `python -u`
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    retrying.mode = stream.mode  # type: ignore[misc]
    atexit.register(raw.retry)
    os.register_at_fork(after_in_child=raw.forget)
    return retrying


class RetryingFile(io.FileIO):
    """An open file whose `write` never fails for the disk's sake: what does not fit waits in memory for the next one.

    The first KEPT_BYTES of an outage wait; of what comes after them the lines are counted, and the file says so.
    """

    KEPT_BYTES = 1 << 20

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self.name = name
        self._backlog = Backlog(self.KEPT_BYTES)
        self._lost: int | None = None
        """Lines for which there was no room in memory either."""
        self._reason = ""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Take all of `data`; raises what has nothing to do with the disk, as for a pipe whose reader is gone."""
        self.retry()
        rest = bytes(data)
        if not self._backlog:
            rest = rest[self._put(rest) :]
        if rest and not self._backlog.add(rest):
            self._lost = (self._lost or 0) + rest.count(b"\n")
        return len(data)

    def retry(self) -> None:
        """Write what waits, if there is room by now, and how much was lost after it."""
        if self._backlog:
            self._backlog.flush(self._put)
        if self._lost is not None and not self._backlog:
            note = f"\njobkit: {self._lost} lines were lost here: {self._reason}\n".encode()
            self._lost = None
            self._backlog.add(note[self._put(note) :])

    def forget(self) -> None:
        self._backlog.clear()
        self._lost = None

    def _put(self, data: bytes) -> int:
        written = 0
        try:
            while written < len(data) and (count := super().write(data[written:])) is not None:
                written += count
        except OSError as error:
            if not disk_errno(error):
                raise
            self._reason = os.strerror(error.errno or 0)
        return written
