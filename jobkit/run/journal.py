"""The journal of a run: events.jsonl, one writer at a time, and status.json, which follows from it.

    append(event) --> events.jsonl (durable) --> fold --> Status, and status.json for those that read many runs

The writer is the process with the lease (`writer`): a supervisor, an agent that rescues, rank 0 under another launcher.
While no job lives it is a command under the run's lock (`writer=None`): the submission, `cancel`, `rewind`. Every
append reads the lease first: an attempt that lost it writes nothing more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobkit.errors import LostLease
from jobkit.run import older, records
from jobkit.run.files import json_text, read_fresh, sync_folder, write_json
from jobkit.run.records import EVENTS, Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status, fold


class Journal:
    """Appends events to a run's journal.

    journal = Journal(run, writer=lease.writer)
    journal.append(Cancelled(user="alice"))
    journal.status.state     # "cancelled"
    """

    def __init__(self, run: RunDir, writer: str | None = None) -> None:
        self.run = run
        self.writer = writer
        self.status = read_status(run)
        """Follows each append, the pending ones included."""
        self._pending: list[Event] = []

    def refresh(self) -> None:
        """Read the status again: a submission may have appended under the run's lock."""
        self.status = known_status(self.run)
        for event in self._pending:
            self.status = fold(self.status, event)

    def append(self, event: Event) -> None:
        """Append an event durably, and let status.json follow; or raise LostLease or OSError, and append nothing."""
        before = self.status
        self.note(event)
        try:
            self.flush()
        except OSError:
            self._pending.pop()
            self.status = before
            raise

    def note(self, event: Event) -> None:
        """Let the status follow an event now; `flush` writes it, once the disk takes it."""
        event = dataclasses.replace(event, time=event.time or time.time())
        self.status = fold(self.status, event)
        self._pending.append(event)

    def flush(self) -> None:
        """Write the events that were noted. Raises LostLease, and OSError where the disk takes none of them."""
        if not self._pending:
            return
        if self.writer is not None:
            lease = self.run.lease()
            if lease is None or lease.writer != self.writer:
                raise LostLease(f"{self.run.name}: another process has taken the run over")
        values = [{"event": event.kind, **records.plain(event)} for event in self._pending]
        _append(self.run.journal_file, "".join(f"{json_text(value, indent=None)}\n" for value in values).encode())
        self._pending.clear()
        with suppress(OSError):  # a cache, which is older than the journal now: readers notice that
            size = self.run.journal_file.stat().st_size
            write_json(self.run.status_file, {"journal_bytes": size, **self.status.as_dict()}, durable=False)


def _append(file: Path, data: bytes) -> None:
    """Append whole lines durably. Bytes behind the last line end are a line that a crash has cut off."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            end = os.pread(descriptor, end, 0).rfind(b"\n") + 1
        # Not O_APPEND: on NFS an append of a client that has not heard of the last one overwrites it all the same.
        os.ftruncate(descriptor, end)
        try:
            written = os.pwrite(descriptor, data, end)
            if written < len(data):
                raise OSError(28, "No space left on device", str(file))
            os.fsync(descriptor)
            if not end:  # of the first event the names are new, too: the journal's, and often the run's
                sync_folder(file.parent)
                sync_folder(file.parent.parent)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def events(run: RunDir) -> Iterator[Event]:
    """Yield the journal's events; lines that are cut off, or of kinds that this jobkit does not know, are left out."""
    try:
        lines = read_fresh(run.journal_file).splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            value = json.loads(line)
            yield records.of(EVENTS[value["event"]], value)
        except (ValueError, KeyError, TypeError):
            continue


def read_status(run: RunDir) -> Status:
    """Return the run's Status, from its journal."""
    status = Status(name=run.name)
    for event in events(run):
        status = fold(status, event)
    return status if status.submitted is not None else older.read(run) or status


def known_status(run: RunDir) -> Status:
    """Return the Status of a run that was there before. Raises OSError if its directory is gone, as of a mount."""
    status = read_status(run)
    if status.submitted is None:
        run.refuse_absence()
    return status


_DECODER = json.JSONDecoder()


def cached_status(run: RunDir) -> dict[str, Any] | None:
    """Return the content of status.json; None where it is older than the journal. `list` reads thousands of them."""
    try:  # texts in the place of Paths, and no buffer: each is a fifth of the time
        with open(f"{run.folder}/status.json", "rb", buffering=0) as file:  # noqa: PTH123
            value = _DECODER.raw_decode(file.read().decode())[0]
        is_ours = isinstance(value, dict) and not older.is_older(value)
        is_new = is_ours and value.get("journal_bytes") == os.stat(f"{run.folder}/events.jsonl").st_size  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return value if is_new else None
