"""The slots of snapshots in memory: files without a name, which the parent of a rank makes and keeps open.

A rank that dies leaves them as they are; the kernel frees them when the last process that has them open is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

SLOTS = "JOBKIT_MEMORY_SLOTS"
"""Environment variable of a rank: its two open files, `3,4`; absent where nobody keeps snapshots for it."""

_NAME = "jobkit-slot"


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
