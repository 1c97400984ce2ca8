"""The append-only journal of a run: what happened, in order. Everything else that is said of a run derives from it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from jobkit.run.append import append_whole
from jobkit.run.claim import Claim, claimed
from jobkit.run.files import FOR_ALL, read_fresh

Entry = dict[str, Any]
"""One event as it stands in the journal: `time`, `event` and the fields of its kind."""


class Journal:
    """events.jsonl: one JSON object a line, with `time` (seconds since the epoch) and `event` first.

    One writer at a time appends, whichever host it is on (claim.py), by one write() to a file opened for appending, and
    fsyncs. A crash can leave at most a torn last line, which readers skip and the next writer ends. A line that a full
    disk took only a part of is taken back. A writer that was stopped within an append for longer than a claim is
    respected still appends a whole line behind all others; on NFS alone it may be written over one of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **fields: Any) -> Entry:
        """Write one event and return it; raises OSError when it cannot be made durable."""
        entry: Entry = {"time": round(time.time(), 3), "event": event, **fields}
        self.append_lines(encode(entry))
        return entry

    def append_lines(self, lines: bytes) -> None:
        """Write whole lines, all or none; raises OSError when they cannot be made durable."""
        is_written = False
        while not is_written:
            with claimed(self.path) as claim:
                is_written = self._append(lines, claim)

    def _append(self, lines: bytes, claim: Claim) -> bool:
        # Opened under the claim: only then does NFS say how long the file is by now, and append where it ends.
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, FOR_ALL)
        try:
            size = os.fstat(fd).st_size
            # A crash has left a torn line: without its end it would swallow the next one.
            end = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
            if claim.may_be_lost():
                return False
            append_whole(fd, end + lines, durable=True)
        finally:
            os.close(fd)
        return True

    def read(self) -> list[Entry]:
        """All events, oldest first; lines that are not whole are skipped."""
        try:
            lines = read_fresh(self.path).splitlines()
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := decode(line)) is not None]


def decode(line: bytes) -> Entry | None:
    """The event in a line of the journal; None where it is not whole."""
    try:
        entry = json.loads(line.decode(errors="replace"))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None


def encode(entry: Entry) -> bytes:
    """An event as a line of the journal."""
    return (json.dumps(entry, default=str) + "\n").encode()
