"""A checkpoint's file has the bytes that it was given, in their order, however the process ends that writes it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import thread
from pathlib import Path

import pytest

from jobkit.checkpoint import storage
from jobkit.checkpoint.storage import ChecksummedFile
from jobkit.checkpoint.store import digest_of


def overtaken(act: Callable[[ChecksummedFile, memoryview], None]) -> Callable[[ChecksummedFile, memoryview], None]:
    """`act`, which for the first block takes so long that one after it could overtake it."""
    later = threading.Event()

    def slowly(file: ChecksummedFile, view: memoryview) -> None:
        if view[:1] == b"\0":
            later.wait(1.0)
        act(file, view)
        if view[:1] != b"\0":
            later.set()

    return slowly


def test_blocks_keep_their_order_where_the_interpreter_ends_while_some_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BLOCK", mmap.PAGESIZE)
    monkeypatch.setattr(ChecksummedFile, "_write", overtaken(ChecksummedFile._write))
    monkeypatch.setattr(ChecksummedFile, "_checksum", overtaken(ChecksummedFile._checksum))
    data = b"".join(bytes([number]) * mmap.PAGESIZE for number in range(4))
    with ChecksummedFile(tmp_path / "file") as file:
        file.write(memoryview(data)[: mmap.PAGESIZE])
        monkeypatch.setattr(thread, "_shutdown", True)  # as when Python has begun to end: no pool takes more work
        file.write(memoryview(data)[mmap.PAGESIZE :])
    written = (tmp_path / "file").read_bytes()
    assert [written[number * mmap.PAGESIZE] for number in range(4)] == [0, 1, 2, 3]
    assert written == data and file.digest == digest_of(tmp_path / "file")
