"""The agreement between two steps, as a pure function: each rank says its wish, the maximum of all decides.

    Wish of each rank --vector, all-reduce MAX--> decide() --> Decision, the same on every rank

loop.py calls this each quarter of a second. With maxima alone a minimum is the negative of a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGREEMENT_SECONDS = 0.25
"""Between two agreements: an agreement waits for all ranks, and would slow short steps down if each had one."""

MAX_STEPS = 32
"""Steps between two agreements at most: steps that suddenly take longer must not put a stop off for minutes."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One rank's part of an agreement."""

    ordinal: int
    """Counts boundaries: ranks that take different numbers of batches are at different ones."""
    stop: bool = False
    disk: int = 0
    """1: a checkpoint is due. 2: so many were missed on a full disk that the training waits for this one."""
    memory: bool = False
    """A snapshot in memory is due."""
    bad: bool = False
    """A loss of this rank was not a finite number."""
    step_seconds: float = 0.0
    complete: int = 0
    """The number of this rank's newest complete snapshot."""
    peak_bytes: int = 0

    def vector(self) -> list[float]:
        """Return the wish as numbers, for an element-wise maximum over the ranks."""
        return [
            self.ordinal,
            -self.ordinal,
            self.stop,
            self.disk,
            self.memory,
            self.bad,
            self.step_seconds,
            -self.complete,
            self.peak_bytes,
        ]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The agreement of all ranks."""

    stop: bool
    disk: bool
    holds: bool
    """The steps wait until the checkpoint is durable."""
    memory: bool
    bad: bool
    apart: tuple[int, int] | None
    """The least and the greatest ordinal, where the ranks are not at the same boundary."""
    steps_to_next: int
    """The next agreement comes after so many steps."""
    least_complete: int
    peak_bytes: int


def decide(maximum: Sequence[float]) -> Decision:
    """Return the decision that follows from the maximum of all ranks' vectors.

    A bad loss wins over every save: no checkpoint shall hold its consequences. A checkpoint on the disk, or a stop,
    makes a snapshot in memory needless.
    """
    greatest, negative_least, stop, disk, memory, bad, step_seconds, negative_complete, peak = maximum
    steps = int(AGREEMENT_SECONDS / max(step_seconds, 1e-6))
    return Decision(
        stop=bool(stop) and not bad,
        disk=bool(disk) and not bad,
        holds=disk > 1 and not bad,
        memory=bool(memory) and not (disk or stop or bad),
        bad=bool(bad),
        apart=(int(-negative_least), int(greatest)) if greatest != -negative_least else None,
        steps_to_next=max(1, min(MAX_STEPS, steps)),
        least_complete=int(-negative_complete),
        peak_bytes=int(peak),
    )
