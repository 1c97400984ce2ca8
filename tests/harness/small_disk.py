"""A small file system over a folder: full, without inodes, or read-only, as a disk of a cluster is for everybody.

with SmallDisk(folder) as disk:
    disk.fill()
    disk.empty()
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from types import TracebackType

import pytest

INODES = 500
QUIET_LOOKS = 20  # of 0.1 s: longer than the second in which a run writes its progress again


class SmallDisk:
    """A file system of some megabytes; the test is skipped where nobody may mount one."""

    libc = ctypes.CDLL(None, use_errno=True)
    READ_ONLY, REMOUNT, DETACH, BIND = 1, 32, 2, 4096

    def __init__(self, folder: Path, megabytes: int = 1) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if self.libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={megabytes}m,nr_inodes={INODES}".encode()):
            pytest.skip("only root can mount a small file system")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        while self.folder.is_mount():
            self.remove()

    def fill(self) -> None:
        """Leave no block, and fill the block that the journal has begun.

        Once is not enough beside a run: what it was writing in that moment is taken back, and leaves its room.
        """
        quiet = 0
        while quiet < QUIET_LOOKS:
            quiet = 0 if self._take_room() else quiet + 1
            time.sleep(0.1)

    def _take_room(self) -> int:
        """Take what is free, and return the number of bytes."""
        taken = 0
        with pytest.raises(OSError, match="No space left"), (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                taken += file.write(bytes(4096))
        for journal in self.folder.glob("*/events.jsonl"):
            if room := -journal.stat().st_size % 4096:
                with journal.open("ab", buffering=0) as file:
                    taken += file.write(b"noise".ljust(room - 1) + b"\n")
        return taken

    def empty(self) -> None:
        (self.folder / "ballast").unlink()

    def use_all_inodes(self) -> None:
        """Leave blocks, and no inode for a new file."""
        with pytest.raises(OSError) as refused:
            for number in range(INODES):
                (self.folder / f".file{number}").touch()
        assert refused.value.errno == errno.ENOSPC

    def free_inodes(self) -> None:
        for file in self.folder.glob(".file*"):
            file.unlink()

    def make_read_only(self) -> None:
        """Refuse all that is opened from here on; what is open for writing stays so."""
        name = bytes(self.folder)
        for flags in (self.BIND, self.BIND | self.REMOUNT | self.READ_ONLY):
            assert self.libc.mount(name, name, None, flags, None) == 0, os.strerror(ctypes.get_errno())

    def make_writable(self) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the newest mount away: that of `make_read_only`, else the file system."""
        self.libc.umount2(bytes(self.folder), self.DETACH)
