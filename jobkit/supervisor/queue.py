"""The queue of this machine: a place in the line of those who wait for devices or CPU slots.

There is no daemon. Each who waits looks at the tickets of all (tickets.py), and takes what it needs when nobody who
wants the same is before it. First come, first served; a run that needs much is not overtaken by those that need less.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from jobkit.supervisor import device_leases, tickets
from jobkit.supervisor.device_leases import Leases, could_be_taken
from jobkit.supervisor.line import Line
from jobkit.supervisor.needs import Need
from jobkit.supervisor.preemption import Preemption
from jobkit.supervisor.tickets import Ticket

LOOK_SECONDS = 0.25
"""How often the first in the line looks whether it can start."""

SLOWEST_LOOK_SECONDS = 3.0
"""How often at least anybody in the line looks: a hundred who wait must not keep a core busy."""

PASS_SECONDS = 5.0
"""How long what the next in the line waits for may be free until those behind it do not wait for it any more: its
process is stopped. When it goes on it still has its place."""


def take_at_once(need: Need) -> Leases | None:
    """All that is needed, where nobody waits for any of it and it is free; raises OSError as device_leases.take."""
    wanted = {lock.name for pool in need.waited_for for lock in pool.locks}
    return None if wanted and Line(need.folder).wants_any(wanted) else device_leases.take(need)


class Place:
    """A place in the line, from its making until `leave`. One process may have several, each for another run.

    Raises OSError where the folder of the tickets cannot be used.
    """

    def __init__(self, need: Need, run: Path, priority: int = 0) -> None:
        self.need = need
        self.run = run
        self._ticket, self._file = tickets.draw(need, run, priority)
        self._preemption = Preemption(need, priority)
        self._able_since: dict[str, float] = {}
        """By their tickets those who could have taken what they wait for, and since when."""
        self._look_at = 0.0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place up; harmless where that was done."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._ticket.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def take(self) -> Leases | None:
        """What is needed, and the place is left; None where it is not this one's turn, or too little is free.

        To be called again and again; it looks only as often as is worth it. Raises OSError.
        """
        if time.monotonic() < self._look_at:
            return None
        before = self.before()
        self._look_at = time.monotonic() + min(LOOK_SECONDS * (1 + len(before)), SLOWEST_LOOK_SECONDS)
        if not all(map(self._is_passed, before)):
            return None
        leases = device_leases.take(self.need)
        if leases is not None:
            self.leave()
        elif not before:
            self._preemption.make_room()
        return leases

    def wait(self, stops: Callable[[], bool], on_look: Callable[[], object] = lambda: None) -> Leases | None:
        """What is needed, as soon as it can be had; None when `stops` says so. Both are called a few times a second."""
        while not stops():
            if (leases := self.take()) is not None:
                return leases
            on_look()
            time.sleep(LOOK_SECONDS)
        return None

    def before(self) -> list[Ticket]:
        """Those who want the same and come first."""
        line = Line(self.need.folder)
        own = next((one for one in line.tickets if one.file == self._ticket.name), None)
        if own is None:  # somebody has removed it, as a cleaner of /tmp does
            self.leave()
            self._ticket, self._file = tickets.draw(self.need, self.run, self._preemption.priority)
            return self.before()
        return line.before(own)

    def _is_passed(self, other: Ticket) -> bool:
        """Whether one who comes first is not waited for: all that it waits for has been free for a while."""
        if not all(
            could_be_taken((self.need.folder / n for n in one.locks.values()), one.count) for one in other.wants
        ):
            self._able_since.pop(other.file, None)
            return False
        since = self._able_since.setdefault(other.file, time.monotonic())
        return time.monotonic() - since > PASS_SECONDS


def is_wanted(need: Need) -> bool:
    """Whether anybody waits for what a run has that needed this."""
    return Line(need.folder).wants_any({lock.name for pool in need.pools for lock in pool.locks})
