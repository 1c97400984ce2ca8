"""The slots of snapshots in memory: files without a name, which the parent of a rank makes and keeps open.

A rank that dies leaves them as they are; the kernel frees them when the last process that has them open is gone.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SLOTS = "JOBKIT_MEMORY_SLOTS"
"""Environment variable of a rank: its two open files, `3,4`; absent where nobody keeps snapshots for it."""

_NAME = "jobkit-slot"

_MARK = struct.Struct("<QQd")  # attempt, steps done, time
_MARK_AT = 128  # in the first slot, beside what checkpoint/slot.py has in its first page


def make_slots() -> tuple[int, int] | None:
    """Two empty slots for one rank; None where the system has none. A program that is started does not inherit them.

    Raises OSError where no more files can be open.
    """
    if not hasattr(os, "memfd_create"):  # not Linux
        return None
    first = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        return first, os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:
        os.close(first)
        raise


def environment_of(slots: Sequence[int]) -> dict[str, str]:
    """What tells a rank of its slots, by the numbers that the open files have in its own process."""
    return {SLOTS: ",".join(map(str, slots))}


def find_slots(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The slots of this process; None where it was given none, or has the variable but not the files."""
    try:
        first, second = map(int, environ.get(SLOTS, "").split(","))
        links = [str(Path(f"/proc/self/fd/{file}").readlink()) for file in (first, second)]
    except (ValueError, OSError):
        return None
    # Not every process inherits what its parent has open: then the numbers are those of files of the user's.
    return (first, second) if all(link.startswith(f"/memfd:{_NAME}") for link in links) else None


class StepMark:
    """Where a rank leaves how far it is, so that it is known however it dies; in its first slot."""

    def __init__(self, environ: Mapping[str, str], attempt: int) -> None:
        slots = find_slots(environ)
        self._page, self._attempt = None if slots is None else _first_page(slots[0]), attempt

    def set(self, steps: int) -> None:
        """So many steps are done."""
        if self._page is not None:  # written to as memory: a system call for each step would take 20 us
            self._page[_MARK_AT : _MARK_AT + _MARK.size] = _MARK.pack(self._attempt, steps, time.time())


def _first_page(file: int) -> mmap.mmap:
    """The page that a slot has in any case, from its first use on."""
    os.ftruncate(file, max(mmap.PAGESIZE, os.fstat(file).st_size))
    return mmap.mmap(file, mmap.PAGESIZE)


def last_step(slots: Sequence[int] | None, attempt: int | None) -> tuple[int, float] | None:
    """How many steps a rank of an attempt had done, and when, by its StepMark; None where it had done none."""
    data = os.pread(slots[0], _MARK.size, _MARK_AT) if slots else b""
    if len(data) != _MARK.size:
        return None
    marked, steps, when = _MARK.unpack(data)
    return (steps, when) if marked == attempt else None
