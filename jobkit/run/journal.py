"""The append-only journal of a run: what happened, in order. Everything else that is said of a run derives from it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""One event as it stands in the journal: `time`, `event` and the fields of its kind."""


class Journal:
    """events.jsonl: one JSON object a line, with `time` (seconds since the epoch) and `event` first.

    A line is written by one write() to a file opened for appending, and fsynced: writers of one host never mix, and a
    crash can leave at most a torn last line, which readers skip and the next writer ends. A line that a full disk took
    only a part of is taken back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **fields: Any) -> Entry:
        """Write one event and return it; raises OSError when it cannot be made durable.

        `time=...` is for one that happened earlier than now.
        """
        entry: Entry = {"time": round(time.time(), 3), "event": event, **fields}
        line = json.dumps(entry, default=str) + "\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._write(fd, (self._mend(fd) + line).encode())
        finally:
            os.close(fd)
        return entry

    @staticmethod
    def _write(fd: int, data: bytes) -> None:
        before, written = os.fstat(fd).st_size, 0
        try:
            while written < len(data):  # a disk that is just getting full takes a part, and says why the next time
                written += os.write(fd, data[written:])
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_size == before + written:  # nobody has written since
                    os.ftruncate(fd, before)
            raise

    @staticmethod
    def _mend(fd: int) -> str:
        """A newline where the file ends in a torn line, so that the torn one does not swallow the next."""
        size = os.fstat(fd).st_size
        return "\n" if size and os.pread(fd, 1, size - 1) != b"\n" else ""

    def read(self) -> list[Entry]:
        """All events, oldest first; lines that are not whole are skipped."""
        try:
            text = self.path.read_text(errors="replace")
        except FileNotFoundError:
            return []
        events = []
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events
