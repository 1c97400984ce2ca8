"""Who waits for this machine's devices and CPU slots, as anybody may see it: nothing is written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from jobkit.supervisor import lock_files, tickets
from jobkit.supervisor.device_leases import used_by
from jobkit.supervisor.tickets import Ticket


@dataclass(frozen=True)
class Standing:
    """Where in the line one is who waits."""

    place: int
    """1 for the next."""
    text: str
    """What it waits for, as in `1 GPU`."""
    used: str
    """Who has it, as in `0 is used by gpu-acd351b4`."""
    ticket: Ticket

    def __str__(self) -> str:
        return f"{self.ordinal} in line for {self.text}{f' ({self.used})' if self.used else ''}"

    @property
    def ordinal(self) -> str:
        """The place as `1st`, `2nd`, `3rd`, `4th` ..."""
        teen = self.place % 100 in (11, 12, 13)
        ending = "th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(self.place % 10, "th")
        return f"{self.place}{ending}"

    @property
    def name(self) -> str:
        """The run's name, without what a terminal would take for a command."""
        return re.sub(r"[^\w.-]", "?", Path(self.ticket.run).name)


class Line:
    """All who wait here, in order, at one moment."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or lock_files.folder(os.environ)
        self.tickets = tickets.line(self.folder)

    def find(self, run: Path, owner: int) -> Standing | None:
        """Where a user's run is; None where it does not wait here."""
        own = next((one for one in self.tickets if one.run == str(run) and one.owner == owner), None)
        return None if own is None else self._standing(own)

    def standings(self) -> list[Standing]:
        """Where each is, in order."""
        return [self._standing(one) for one in self.tickets]

    def before(self, own: Ticket) -> list[Ticket]:
        """Those who want something that `own` wants, too, and come first."""
        return [one for one in self.tickets[: self.tickets.index(own)] if one.competes_with(own)]

    def wants_any(self, names: set[str]) -> bool:
        """Whether anybody waits for one of these lock files."""
        return any(names & one.locks for one in self.tickets)

    def _standing(self, own: Ticket) -> Standing:
        locks = {name: self.folder / lock for want in own.wants for name, lock in want.locks.items()}
        text = " and ".join(want.text for want in own.wants)
        return Standing(1 + len(self.before(own)), text, used_by(locks), own)
