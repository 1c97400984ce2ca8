"""The page of memory that a rank shares with the agent that forked it.

    agent --stop--> page <--phase, step, beat-- rank

A page is a memfd, so that a program that replaces the rank (`command:`) finds it under JOBKIT_PAGE. It needs no disk
and outlives the rank: the agent reads the last step of a rank that was killed, and sees a rank that hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

VARIABLE = "JOBKIT_PAGE"
"""Environment variable of a rank: the number of the open file with its page."""

BYTES = 4096
_STOP = struct.Struct("<I")
_BEAT = struct.Struct("<IIqddQ")  # attempt, phase, step, time, slowest, beats
_STOP_AT, _BEAT_AT = 0, 64  # a cache line each: the agent writes the first, the rank the second


class Phase(IntEnum):
    """Where a rank is; the watchdog measures only STEPPING."""

    STARTING = 0
    STEPPING = 1
    SAVING = 2
    """All ranks have agreed to stop, and write the last checkpoint."""
    ENDING = 3
    """After the last step."""


@dataclass(frozen=True)
class Beat:
    """The last words of a rank about itself."""

    attempt: int
    phase: Phase
    step: int
    """Steps done; -1 before the loop."""
    time: float
    """Of the monotonic clock, in seconds; 0 before the first beat."""
    slowest: float
    """The longest time between two beats while stepping, in seconds."""
    beats: int


class Page:
    """One rank's page.

    page = Page.create()                       # in the agent, before the fork
    page.ask_to_stop()
    Page.of_environment(os.environ).stop_asked   # in the rank, or in the program that replaced it: True
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, BYTES)

    @classmethod
    def create(cls) -> Page:
        """Return an empty page."""
        descriptor = os.memfd_create("jobkit-page")
        os.ftruncate(descriptor, BYTES)
        page = cls(descriptor)
        _BEAT.pack_into(page._memory, _BEAT_AT, 0, Phase.STARTING, -1, 0.0, 0.0, 0)
        return page

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Page | None:
        """Return the page of this rank; None in a process that no agent has started."""
        return cls(int(environ[VARIABLE])) if VARIABLE in environ else None

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    # The agent's side

    def ask_to_stop(self) -> None:
        """Set the flag that the rank looks at between two steps: no import, fork or exec can lose it."""
        _STOP.pack_into(self._memory, _STOP_AT, 1)

    def read(self) -> Beat:
        """Return what the rank last said."""
        attempt, phase, step, moment, slowest, beats = _BEAT.unpack_from(self._memory, _BEAT_AT)
        return Beat(attempt, Phase(phase), step, moment, slowest, beats)

    # The rank's side

    @property
    def stop_asked(self) -> bool:
        return bool(_STOP.unpack_from(self._memory, _STOP_AT)[0])

    def beat(self, attempt: int, phase: Phase, step: int) -> None:
        """Say where the rank is now: once a step, and within evaluations and saves."""
        now = time.monotonic()
        _, before, _, last, slowest, beats = _BEAT.unpack_from(self._memory, _BEAT_AT)
        if phase == before == Phase.STEPPING:
            slowest = max(slowest, now - last)
        _BEAT.pack_into(self._memory, _BEAT_AT, attempt, phase, step, now, slowest, beats + 1)
