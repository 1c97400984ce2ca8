"""The memory that an agent keeps for each of its ranks: a page, the page of the attempt before, two slots.

    agent --stop--> page <--phase, step, beat, snapshot; hashes of logged values-- rank
    rank  --snapshots of its state--> slots --> the rank of the next attempt

All are memfds, so that a program that replaces the rank (`command:`) has them too. They need no disk and outlive the
rank: the agent reads the last step of a rank that was killed, and the next attempt begins with its snapshot.
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

BEFORE_VARIABLE = "JOBKIT_PAGE_BEFORE"
"""The same for the page of the last attempt that came to its loop."""

SLOTS_VARIABLE = "JOBKIT_SLOTS"
"""The same for the two slots of snapshots: `7,8`."""

BYTES = 65536
_STOP = struct.Struct("<I")
_BEAT = struct.Struct("<IIqddQ")  # attempt, phase, step, time, slowest, beats
_SNAPSHOT = struct.Struct("<q")  # step + 1: a page of zeros has none
_STOP_AT, _BEAT_AT, _SNAPSHOT_AT = 0, 64, 128  # a cache line each: of the agent, of the rank, of a thread of the rank
_NOTE = struct.Struct("<qQ")  # step + 1, hash: a page of zeros has no notes
_NOTES_AT = 4096
NOTES = (BYTES - _NOTES_AT) // _NOTE.size
"""Of so many of the last steps a page has notes."""


class Phase(IntEnum):
    """Where a rank is; the watchdog measures only STEPPING, and waits as long in OUTSIDE as in ENDING."""

    STARTING = 0
    STEPPING = 1
    SAVING = 2
    """All ranks have agreed to stop, and write the last checkpoint."""
    ENDING = 3
    """After the last step."""
    OUTSIDE = 4
    """Between two steps, in lines of the user's that may take long: a validation, the end of an epoch."""


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

    def notes(self) -> dict[int, int]:
        """Return the hash of each noted step."""
        notes = _NOTE.iter_unpack(self._memory[_NOTES_AT : _NOTES_AT + NOTES * _NOTE.size])
        return {step - 1: value for step, value in notes if step}

    def note(self, step: int, value: int) -> None:
        """Note a hash of the values that a step logged: the next attempt compares it if it repeats the step."""
        _NOTE.pack_into(self._memory, _NOTES_AT + step % NOTES * _NOTE.size, step + 1, value)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    # The agent's side

    def ask_to_stop(self) -> None:
        """Set the flag that the rank looks at between two steps: no import, fork or exec can lose it."""
        _STOP.pack_into(self._memory, _STOP_AT, 1)

    def read(self) -> Beat:
        """Return the rank's newest beat."""
        attempt, phase, step, moment, slowest, beats = _BEAT.unpack_from(self._memory, _BEAT_AT)
        return Beat(attempt, Phase(phase), step, moment, slowest, beats)

    @property
    def snapshot_step(self) -> int | None:
        """The step of the newest snapshot that this rank has completed; None if there is none."""
        step: int = _SNAPSHOT.unpack_from(self._memory, _SNAPSHOT_AT)[0] - 1
        return step if step >= 0 else None

    # The rank's side

    def note_snapshot(self, step: int) -> None:
        """Note that a snapshot is complete."""
        _SNAPSHOT.pack_into(self._memory, _SNAPSHOT_AT, step + 1)

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


class Kept:
    """The memory that an agent keeps from attempt to attempt for each of its ranks: its first, its second ..."""

    def __init__(self, *, with_slots: bool) -> None:
        self._with_slots = with_slots
        self._slots: dict[int, tuple[int, int]] = {}
        self._last: dict[int, Page] = {}
        self._before: dict[int, Page] = {}
        self._world_size = 0

    def environment(self, number: int, page: Page, world_size: int) -> dict[str, str]:
        """Return the variables of the agent's rank `number`, which is about to be forked, and whose page this is."""
        if world_size != self._world_size:  # sums over other ranks have other bits
            for kept in (*self._last.values(), *self._before.values()):
                kept.close()
            self._world_size, self._last, self._before = world_size, {}, {}
        if (last := self._last.pop(number, None)) is not None:
            over: Page | None = last
            if last.read().step >= 0:  # an attempt that came to no step has nothing to compare with
                over, self._before[number] = self._before.get(number), last
            if over is not None:
                over.close()
        self._last[number] = Page(os.dup(page.descriptor))
        variables = self.slots(number)
        if number in self._before:
            variables[BEFORE_VARIABLE] = str(_inheritable(self._before[number].descriptor))
        return variables

    def slots(self, number: int) -> dict[str, str]:
        """Return the variable of the slots of the agent's rank `number`; nothing where snapshots are off."""
        if not self._with_slots:
            return {}
        if number not in self._slots:
            self._slots[number] = os.memfd_create("jobkit-slot"), os.memfd_create("jobkit-slot")
        return {SLOTS_VARIABLE: ",".join(str(_inheritable(slot)) for slot in self._slots[number])}


def _inheritable(descriptor: int) -> int:
    os.set_inheritable(descriptor, True)  # for the program of a `command:`
    return descriptor


def page_before(environ: Mapping[str, str]) -> Page | None:
    """Return the page of the attempt before; None where there was none on this node."""
    return Page(int(environ[BEFORE_VARIABLE])) if BEFORE_VARIABLE in environ else None


def slots_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the descriptors of this rank's two slots; None where no agent made any."""
    if SLOTS_VARIABLE not in environ:
        return None
    first, second = map(int, environ[SLOTS_VARIABLE].split(","))
    return first, second
