"""The comparison of repeated steps in production: each attempt's logged bits against those of the attempt before.

    this attempt's values of step n --hash--> page of this rank (a ring of the last steps)
                                              page of the attempt before --same step, same hash?--> Progress.repeats

Rank 0 compares. The reporter calls this; `status` says "37 steps repeated, 21 compared, equal". `jobkit verify` does
not use it: it compares two whole runs (verify/compare.py).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import xxhash

from jobkit.wire.pages import Page

TIMES = "perf/"
"""Values under this name measure time, and are left out."""


def hash_of(values: Mapping[str, float]) -> int:
    """Return a hash of the raw bits of logged values; 0 where there is nothing to compare."""
    state = xxhash.xxh3_64()
    count = 0
    for name, value in values.items():
        if not name.startswith(TIMES):
            state.update(name.encode())
            state.update(struct.pack("<d", value))
            count += 1
    return state.intdigest() or 1 if count else 0


class Repeats:
    """Compares this attempt's first steps with the last steps of the attempt before.

    `before` is that attempt's page; None where there is nothing to compare with: another node or device.
    """

    def __init__(self, page: Page, before: Page | None, first_step: int) -> None:
        self._page = page
        self._notes = {} if before is None else before.notes()
        reached = before.read().step if before is not None else first_step
        self.repeated = max(0, reached - first_step)
        """Steps that the attempt before had done already."""
        self.compared = 0
        self.differs_at: int | None = None

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the values that a step logged."""
        value = hash_of(values)
        if not value:
            return
        if (before := self._notes.pop(step, None)) is not None:
            self.compared += 1
            if before != value and self.differs_at is None:
                self.differs_at = step
        self._page.note(step, value)

    def as_dict(self) -> dict[str, int | None] | None:
        """Return the comparison for Progress; None where no step is repeated."""
        if not self.repeated:
            return None
        return {"repeated": self.repeated, "compared": self.compared, "differs_at": self.differs_at}
