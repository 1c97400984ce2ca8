"""When a checkpoint or a snapshot in memory is due: after so many steps, after so much time, or as `auto` works out.

    checkpoint.every, checkpoint.memory + the run's deaths so far + measured costs --> due?

saving.py calls this. An interval in steps is the same on all ranks. An interval in seconds is rank 0's, and the
other ranks learn of it in the next agreement (agreement.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobkit.config.schema import AUTO
from jobkit.duration import parse_seconds
from jobkit.run.records import AttemptEnded

FIRST_SECONDS = 30.0
"""Until the first checkpoint, whose cost is then known."""

MAX_SECONDS = 1800.0
"""More than this nobody wants to compute again, however rarely a run dies."""

MAX_OVERHEAD = 0.01
"""The part of the training's time that snapshots, and very frequent checkpoints, may cost at most."""

MIN_MEMORY_SECONDS = 2.0
"""Between two snapshots of `auto`: two seconds are soon repeated."""

PRIOR_SECONDS = 8 * 3600.0
"""Time between failures to begin with, until a run has seen some of its own."""

HARD = frozenset({"crashed", "killed", "out_of_memory", "hang", "node_failure", "disk", "unknown"})
"""Causes that leave no time to save."""


@dataclass(frozen=True)
class History:
    """How often the attempts of a run died."""

    lived: float = 0.0
    """Seconds."""
    deaths: int = 0

    @classmethod
    def of(cls, ends: Sequence[tuple[float, AttemptEnded]]) -> History:
        """Return the history of attempts, given as (time of the begin, end)."""
        lived = sum(max(0.0, ended.time - began) for began, ended in ends)
        return cls(lived, sum(ended.cause in HARD for _, ended in ends))

    @property
    def seconds_between_deaths(self) -> float:
        """Mean time between failures as far as seen, weighed with PRIOR_SECONDS once."""
        return (PRIOR_SECONDS + self.lived) / (1 + self.deaths)


def young(cost: float, mtbf: float) -> float:
    """Return Young's interval in seconds: "A first order approximation to the optimum checkpoint interval", 1974."""
    return math.sqrt(2 * cost * mtbf)


@dataclass
class AutoInterval:
    """`checkpoint.every: auto`: the time between two checkpoints, from their cost and the run's deaths.

    interval = AutoInterval(mtbf=8 * 3600.0)
    interval.observe(stall=0.1, seconds=2.0)
    interval.seconds      # 75.9
    """

    mtbf: float
    """Mean time between failures, in seconds."""
    cost: float | None = None
    """Seconds for which a checkpoint holds up the training; None before the first."""
    durable: float = 0.0
    """Seconds until one is on the disk."""

    def observe(self, stall: float, seconds: float) -> None:
        """Take in the cost of a checkpoint."""
        self.cost = stall if self.cost is None else 0.5 * (self.cost + stall)
        self.durable = max(seconds, 0.5 * (self.durable + seconds))

    @property
    def seconds(self) -> float:
        """Young's interval, at most MAX_SECONDS or as MAX_OVERHEAD asks for, at least two times a write to the disk."""
        if self.cost is None:
            return FIRST_SECONDS
        longest = max(MAX_SECONDS, self.cost / MAX_OVERHEAD)
        return max(min(young(self.cost, self.mtbf), longest), 2 * self.durable)


@dataclass
class Clock:
    """The time of the next save. `steps` or `seconds` decide, or `auto` changes `seconds`."""

    steps: int | None = None
    seconds: float | None = None
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, every: str | int | bool, first_seconds: float) -> Clock:
        """Return the clock of a YAML's value; `first_seconds` are those of `auto` at the beginning."""
        if every is False or every == "off":
            return cls()
        if every == AUTO:
            return cls(seconds=first_seconds)
        return cls(seconds=parse_seconds(every)) if isinstance(every, str) else cls(steps=int(every))

    def restart(self) -> None:
        """Count time from here."""
        self.since = time.monotonic()

    def has_passed(self, intervals: int, since: float, step: int, now_at: int) -> bool:
        """Return whether so many intervals have passed since a time and a step."""
        if self.steps is not None:
            return now_at - step >= intervals * self.steps
        return self.seconds is not None and time.monotonic() - since >= intervals * self.seconds

    def is_due_after(self, step: int) -> bool:
        """Return whether the number of steps done calls for a save: the same on every rank."""
        return self.steps is not None and step % self.steps == 0

    def is_due_now(self) -> bool:
        """Return whether the time calls for a save, by this rank's clock."""
        return self.seconds is not None and time.monotonic() - self.since >= self.seconds
