"""The slots of snapshots in memory: files without a name, which the parent of a rank makes and keeps open.

A rank that dies leaves them as they are; the kernel frees them when the last process that has them open is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

SLOTS = "JOBKIT_MEMORY_SLOTS"
"""Environment variable of a rank: its two open files, `3,4`; absent where nobody keeps snapshots for it."""


def make_slots() -> tuple[int, int] | None:
    """Two empty slots for one rank, not inherited by programs that are started; None where the system has none.

    Raises OSError where no more files can be open.
    """
    if not hasattr(os, "memfd_create"):  # not Linux
        return None
    first = os.memfd_create("jobkit-slot-0", os.MFD_CLOEXEC)
    try:
        return first, os.memfd_create("jobkit-slot-1", os.MFD_CLOEXEC)
    except OSError:
        os.close(first)
        raise


def environment_of(slots: Sequence[int]) -> dict[str, str]:
    """What tells a rank of its slots, by the numbers that the open files have in its own process."""
    return {SLOTS: ",".join(map(str, slots))}


def find_slots(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The slots of this process; None where it was given none, or what it was given is not open."""
    try:
        first, second = map(int, environ.get(SLOTS, "").split(","))
        for file in (first, second):
            os.fstat(file)
    except (ValueError, OSError):
        return None
    return first, second
