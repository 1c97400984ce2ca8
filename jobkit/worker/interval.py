"""`checkpoint.every: auto`: how long to go without a checkpoint, from what one costs and how often a run dies.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974: sqrt(2 * cost * MTBF).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.run.duration import format_seconds
from jobkit.run.status import Attempt

FIRST_SECONDS = 30.0
"""Until the first checkpoint, whose cost is then known."""

MAX_SECONDS = 1800.0
"""However rarely it dies: what a person would mind losing."""

MAX_OVERHEAD = 0.01
"""Of the training's time, what checkpoints may cost at most."""

PRIOR_SECONDS = 8 * 3600.0
"""Time between failures to begin with, until a run has seen some of its own."""


def mean_time_between_failures(attempts: Sequence[Attempt]) -> float:
    """Seconds of run for each end that left no time to save, as far as seen, weighed with PRIOR_SECONDS once."""
    lived = sum(max(0.0, (attempt.ended or attempt.started) - attempt.started) for attempt in attempts)
    return (PRIOR_SECONDS + lived) / (1 + sum(attempt.ended_hard for attempt in attempts))


@dataclass
class AutoInterval:
    """The interval between two checkpoints."""

    mtbf: float
    """Mean time between failures, in seconds."""
    cost: float | None = None
    """Seconds for which a checkpoint holds up the training; None before the first."""
    durable: float = 0.0
    """Seconds until one is on the disk."""

    def observe(self, stall: float, seconds: float) -> None:
        """A checkpoint has been written: it held up the training for `stall`, and was durable after `seconds`."""
        self.cost = stall if self.cost is None else 0.5 * (self.cost + stall)
        self.durable = max(seconds, 0.5 * (self.durable + seconds))

    @property
    def seconds(self) -> float:
        """Young's interval, within what MAX_OVERHEAD, the disk and a person's patience allow."""
        if self.cost is None:
            return FIRST_SECONDS
        ideal = math.sqrt(2 * self.cost * self.mtbf)
        return max(min(ideal, MAX_SECONDS), self.cost / MAX_OVERHEAD, 2 * self.durable)

    def explain(self) -> str:
        """The interval and what it follows from, in words."""
        cost = "not known yet" if self.cost is None else f"{self.cost:.3g} s"
        return (
            f"a checkpoint every {self.seconds:.3g} s: one holds up the training for {cost}, "
            f"time between failures {format_seconds(self.mtbf)}"
        )
