"""What waits for a full disk: in order, within its limit, whole records, and one gap where there was no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jobkit.run.append import Backlog, Outage, append_whole


def no_space(data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_was_not_taken_is_written_later_in_its_order() -> None:
    backlog, written = Backlog(100), bytearray()
    for record in (b"one ", b"two ", b"three "):
        assert backlog.add(record)
        with pytest.raises(OSError, match="No space"):
            backlog.flush(no_space)
    backlog.flush(lambda data: written.extend(data[:5]) or 5)
    assert len(backlog) == 9
    assert backlog.add(b"four")
    backlog.flush(written.extend)
    assert written == b"one two three four" and not backlog


def test_what_there_is_no_room_for_is_one_gap() -> None:
    backlog, written = Backlog(6), bytearray()
    assert backlog.add(b"aaaa")
    assert not backlog.add(b"bbbb")
    assert not backlog.add(b"c"), "it would fit, but what is missing would be two gaps then"
    backlog.flush(lambda data: written.extend(data[:2]) or 2)
    assert not backlog.add(b"d")
    backlog.flush(written.extend)
    assert backlog.add(b"e")
    backlog.flush(written.extend)
    assert written == b"aaaae"


def test_a_record_larger_than_the_limit_is_kept_where_nothing_else_waits() -> None:
    backlog, written = Backlog(6), bytearray()
    assert backlog.add(b"larger than six bytes")
    assert not backlog.add(b"b")
    backlog.flush(written.extend)
    assert backlog.add(b"c"), "the backlog must not stay full once it is empty"
    backlog.flush(written.extend)
    assert written == b"larger than six bytesc"


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before\n")
    fd, write = os.open(path, os.O_WRONLY | os.O_APPEND), os.write

    def takes_a_part(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:5])

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "write", takes_a_part)
        append_whole(fd, b"twelve bytes", durable=True)
    assert path.read_bytes() == b"before\n"
    append_whole(fd, b"twelve bytes", durable=True)
    os.close(fd)
    assert path.read_bytes() == b"before\ntwelve bytes"


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("jobkit.run.append.log.warning", lambda text, *values: told.append(text % values))
    outage = Outage("the journal", "Training goes on.")
    for full in (False, True, True, False, False, True):
        with outage.survived():
            if full:
                no_space(b"")
    assert [text.split()[2] for text in told] == ["cannot", "is", "cannot"]


def test_other_errors_are_no_outage() -> None:
    with pytest.raises(ValueError, match="mine"), Outage("x", "").survived():
        raise ValueError("mine")
