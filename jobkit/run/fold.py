"""The status after the events of a journal, without reading again those that have been read before.

What follows from the beginning of a long journal is kept in a file beside it. The file may be deleted at any time, and
whoever may not write it can still read it: where it is missing, damaged, or of another journal or another jobkit, all
events are read, with the same result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from jobkit.run import events, records
from jobkit.run import status as status_module
from jobkit.run.files import is_there, read_json, write_json
from jobkit.run.journal import decode
from jobkit.run.records import Failure, Straggler
from jobkit.run.status import Attempt, State, Status, apply

KEEP_BYTES = 32 << 10
"""How much of a journal may be read again and again: some 200 events, a millisecond or two."""


def fold(journal: Path, kept: Path, *, keep: bool = False) -> Status:
    """The status after all events of a journal, without progress and account.

    Args:
        kept: the file with what follows from the beginning of it.
        keep: write that file where it is missing or KEEP_BYTES old.
    """
    known = read_json(kept)  # before the journal is opened, which then holds all that this follows from
    if not is_there(journal):
        return Status()
    with journal.open("rb") as file:
        status = _restored(known, file) or Status()
        before, last, torn = status.journal_bytes, b"", b""
        file.seek(before)
        for line in file:
            if not line.endswith(b"\n"):
                torn = line  # more of it may come
                break
            _apply_line(status, line)
            last = line
    if keep and status.journal_bytes - before >= KEEP_BYTES:
        with suppress(OSError):  # only a shorter way
            write_json(kept, _plain(status, last), durable=False)
    if torn:
        _apply_line(status, torn)
    return status


def _apply_line(status: Status, line: bytes) -> None:
    status.journal_bytes += len(line)
    if (event := decode(line)) is not None:
        apply(status, event)


def _plain(status: Status, last: bytes) -> dict[str, Any]:
    """What is kept: a status, and the length and digest of the last line that it follows from."""
    plain = dataclasses.asdict(status)
    return {"digest": _digest(plain, last), "last_bytes": len(last), "status": plain}


def _restored(known: Any, journal: BinaryIO) -> Status | None:
    """The status that was kept; None where it is not whole, or does not belong to this journal and this jobkit."""
    try:
        status = _status(known["status"])
        size = known["last_bytes"]
        last = os.pread(journal.fileno(), size, status.journal_bytes - size)
        return status if _digest(known["status"], last) == known["digest"] else None
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def _digest(plain: dict[str, Any], last: bytes) -> str:
    return hashlib.sha256(_rules() + json.dumps(plain).encode() + last).hexdigest()


def _status(plain: dict[str, Any]) -> Status:
    """The status of which `dataclasses.asdict` made plain values; raises what a value of another shape leads to."""
    state, error = plain["before_submission"]
    return Status(
        **plain
        | {
            "state": State(plain["state"]),
            "attempts": [_attempt(one) for one in plain["attempts"]],
            "before_submission": (State(state), error),
            "stragglers": [Straggler(**one) for one in plain["stragglers"]],
        }
    )


def _attempt(plain: dict[str, Any]) -> Attempt:
    failure = plain["failure"]
    return Attempt(**plain | {"failure": None if failure is None else Failure(**failure)})


@cache
def _rules() -> bytes:
    """What a status depends on besides the journal: the code that makes it, which is another in another jobkit."""
    modules = (events, records, status_module)
    return b"".join(hashlib.sha256(inspect.getsource(module).encode()).digest() for module in modules)
