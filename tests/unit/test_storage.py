"""A checkpoint's file has the bytes that it was given, in their order, wherever they lie and however a process ends."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import thread
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from jobkit.checkpoint import storage
from jobkit.checkpoint.staging import HostBuffers
from jobkit.checkpoint.storage import ChecksummedFile, Items, places_of, raw, write_items
from jobkit.checkpoint.store import digest_of

PAGE, LARGE = mmap.PAGESIZE, storage._LARGE


def memory(size: int, start: int = 0) -> memoryview:
    """So many random bytes; they begin at a page, or so far behind."""
    block = mmap.mmap(-1, size + start + 1)
    block[start : start + size] = random.Random(size).randbytes(size)
    return memoryview(block)[start : start + size]


@pytest.fixture(params=["past the page cache", "file system without", "memory without"])
def bypass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the page cache can be bypassed; refused by a file system at the open, or for some memory at the write."""
    if request.param == "file system without":
        real_open = os.open

        def open_(path: Path, flags: int, *mode: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real_open(path, flags, *mode)

        monkeypatch.setattr(os, "open", open_)
    if request.param == "memory without":
        real_write = os.write

        def write(file: int, data: memoryview) -> int:
            if os.get_blocking(file) and storage.fcntl.fcntl(file, storage.fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return real_write(file, data)

        monkeypatch.setattr(os, "write", write)
    return str(request.param)


@pytest.mark.usefixtures("bypass")
@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(0, 0)],
        [(1, 0)],
        [(PAGE, 0), (LARGE, 0), (PAGE - 1, 0)],
        [(LARGE + 5, 0), (LARGE, 0), (3 * LARGE, 0)],
        [(LARGE, 64), (LARGE, 0), (PAGE, 0)],
        [(10 * LARGE + 1, 0), (7, 1), (2 * LARGE, PAGE - 7), (LARGE, 0)],
        [(storage._BLOCK - PAGE, 1), (2 * PAGE, 0), (storage._BLOCK, 0)],
    ],
    ids=str,
)
def test_a_file_has_the_bytes_it_was_given_wherever_they_lie(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    given = [memory(size, start) for size, start in parts]
    with ChecksummedFile(tmp_path / "file") as file:
        for data in given:
            file.write(data)
    assert (tmp_path / "file").read_bytes() == b"".join(given)
    assert file.digest == digest_of(tmp_path / "file")


def test_a_write_that_a_disk_takes_only_a_part_of_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, parts = os.write, iter([512 * 3, PAGE])
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[: next(parts, len(data))]))
    data = memory(2 * LARGE)
    with ChecksummedFile(tmp_path / "file") as file:
        file.write(data)
    assert (tmp_path / "file").read_bytes() == data and file.digest == digest_of(tmp_path / "file")


def test_a_disk_that_gets_full_in_the_middle_is_told_at_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write

    def write(file: int, data: memoryview) -> int:
        if os.fstat(file).st_size >= storage._BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left"), ChecksummedFile(tmp_path / "file") as file:
        file.write(memory(3 * storage._BLOCK))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not any(one.name.startswith("checkpoint-crc") for one in threading.enumerate())


def test_the_checksum_keeps_its_order_where_the_interpreter_ends_while_some_is_being_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, later = ChecksummedFile._checksum, threading.Event()

    def overtaken(file: ChecksummedFile, view: memoryview) -> None:
        if view[:1] == b"\0":  # so slow that what comes after could overtake it
            later.wait(1.0)
        real(file, view)
        if view[:1] != b"\0":
            later.set()

    monkeypatch.setattr(ChecksummedFile, "_checksum", overtaken)
    parts = [memory(LARGE) for _ in range(4)]
    for number, part in enumerate(parts):
        part[0] = number
    with ChecksummedFile(tmp_path / "file") as file:
        file.write(parts[0])
        monkeypatch.setattr(thread, "_shutdown", True)  # as when Python has begun to end: no pool takes more work
        for part in parts[1:]:
            file.write(part)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert file.digest == digest_of(tmp_path / "file")


def test_the_checksum_is_right_where_a_thread_can_be_started_only_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near a limit of processes: the pool keeps what it was given, and does it with the first thread it gets."""
    real, refusals = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with ChecksummedFile(tmp_path / "file") as file:
        for _ in range(3):
            file.write(memory(LARGE))
    assert not refusals and file.digest == digest_of(tmp_path / "file")


# The tensors of a state


def items_of(copies: dict[str, torch.Tensor]) -> list[tuple[WriteItem, torch.Tensor | bytes]]:
    return [(WriteItem(MetadataIndex(key), WriteItemType.TENSOR), copy) for key, copy in copies.items()]


SHAPES: list[tuple[int, ...]] = [(3,), (0, 4), (), (300_000,), (5,), (1000, 300), (0,), (7, 7), (2_500_000,), (1,)]
PICKLED = (WriteItem(MetadataIndex("skeleton"), WriteItemType.BYTE_IO), b"what is pickled")


def check(directory: Path, items: Items) -> bytes:
    """What lies at its place in the file is what was given; the bytes between them."""
    places = places_of(0, items)
    digest, pickled = write_items(directory, 0, items, places)
    written = (directory / storage.file_of(0)).read_bytes()
    assert digest == digest_of(directory / storage.file_of(0))
    end, between = 0, b""
    for (item, value), (index, extent) in zip(items, [*places, *pickled], strict=True):
        assert index is item.index
        assert extent.offset >= end
        between += written[end : extent.offset]
        end = extent.offset + extent.length
        expected = value if isinstance(value, bytes) else bytes(raw(value))
        assert written[extent.offset : end] == expected
    assert end == len(written)
    return between


def blocks() -> Iterator[HostBuffers]:
    yield HostBuffers()
    yield HostBuffers(lambda size, _: torch.full((size,), 255, dtype=torch.uint8))  # used before for something else


@pytest.mark.usefixtures("bypass")
def test_each_tensor_is_at_its_place_in_a_ranks_file(tmp_path: Path) -> None:
    state = {str(number): torch.randn(shape) for number, shape in enumerate(SHAPES)}
    state["half"] = torch.randn(1001).to(torch.bfloat16)
    state["flags"] = torch.rand(11) > 0.5
    for buffers in blocks():
        items = items_of(buffers.copy(state))
        assert not any(check(tmp_path, [*items, PICKLED]))  # nothing that was in that memory before
        check(tmp_path, [*items[1::2], PICKLED])  # some are another rank's to write
        check(tmp_path, [*reversed(items), PICKLED])
    check(tmp_path, [PICKLED])
    check(tmp_path, [])


def test_tensors_in_several_slabs_are_at_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobkit.checkpoint.staging._SLAB", 2 << 20)
    monkeypatch.setattr("jobkit.checkpoint.staging.has_streams", lambda kind: True)  # page-locked, as for a GPU
    module = type("Device", (), {"synchronize": lambda *_: None, "current_stream": lambda *_: module})
    monkeypatch.setattr("jobkit.checkpoint.staging.torch.get_device_module", lambda device: module)
    state = {str(number): torch.randn(shape) for number, shape in enumerate(SHAPES * 2)}
    copies = HostBuffers().copy(state)
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values() if copy.numel()}) > 2
    assert not any(check(tmp_path, [*items_of(copies), PICKLED]))


def test_what_is_one_piece_of_memory_is_written_as_one_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended: list[tuple[int, int]] = []
    real = ChecksummedFile._append

    def append(file: ChecksummedFile, view: memoryview) -> None:
        appended.append((storage._address(view), len(view)))
        real(file, view)

    monkeypatch.setattr(ChecksummedFile, "_append", append)
    state = {str(number): torch.full((300 + number % 7,), float(number)) for number in range(5000)}
    state["large"] = torch.randn(1_000_000)
    copies = HostBuffers().copy(state)
    check(tmp_path, items_of(copies))
    (where, whole), (_, rest) = appended  # the second is what fills no page
    assert where == copies["0"].data_ptr()
    assert rest < PAGE and whole + rest == copies["large"].data_ptr() + copies["large"].nbytes - where
