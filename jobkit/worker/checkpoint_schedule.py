"""When a checkpoint or a snapshot in memory is due: after so many steps, so much time, or as `auto` finds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.run.config import CheckpointConfig
from jobkit.run.duration import format_seconds, parse_seconds
from jobkit.run.status import Attempt

FIRST_SECONDS = 30.0
"""Until the first checkpoint, whose cost is then known."""

MAX_SECONDS = 1800.0
"""However rarely it dies: more than this nobody wants to compute again."""

MAX_OVERHEAD = 0.01
"""Of the training's time, what snapshots in memory may cost at most; and checkpoints, where MAX_SECONDS is what makes
them so frequent."""

MIN_MEMORY_SECONDS = 2.0
"""Between two snapshots of `auto`: for each TensorBoard's file is made durable, and two seconds are soon repeated."""

PRIOR_SECONDS = 8 * 3600.0
"""Time between failures to begin with, until a run has seen some of its own."""


class CheckpointSchedule:
    """The schedule of one rank's loop: by steps every rank decides alike, by time rank 0 does and tells the others.

    `earlier` are the run's attempts before this one, which tell how often it dies.
    """

    def __init__(self, config: CheckpointConfig, earlier: Sequence[Attempt] = ()) -> None:
        self.auto: AutoInterval | None = None
        self._steps: int | None = None
        self._seconds: float | None = None
        if config.every == "auto":
            if config.mtbf != "auto":
                self.auto = AutoInterval(parse_seconds(config.mtbf), "what checkpoint.mtbf says")
            else:
                self.auto = AutoInterval(mean_time_between_failures(earlier), _how_often_known(earlier))
        elif isinstance(config.every, int):
            self._steps = config.every
        else:
            self._seconds = parse_seconds(config.every)
        self._since = time.monotonic()
        self._explained = 0.0

    def restart(self) -> None:
        """Time counts from here: the loop begins, or a checkpoint has been begun."""
        self._since = time.monotonic()

    def is_due_after(self, step: int) -> bool:
        """Whether the number of steps done calls for a checkpoint: the same on every rank."""
        return self._steps is not None and step % self._steps == 0

    @property
    def seconds_left(self) -> float:
        """Until the clock calls for a checkpoint: this process's clock, which no other rank shares."""
        seconds = self.auto.seconds if self.auto is not None else self._seconds
        return math.inf if seconds is None else self._since + seconds - time.monotonic()

    def is_due_by_time(self) -> bool:
        """Whether it does so now."""
        return self.seconds_left <= 0

    def observe(self, stall: float, seconds: float) -> bool:
        """A checkpoint held up the training for `stall` and was durable after `seconds`; whether that changes `auto`.

        By a quarter of its interval at least: what is less is not worth a line.
        """
        if self.auto is None:
            return False
        self.auto.observe(stall, seconds)
        changed = abs(self.auto.seconds - self._explained) > 0.25 * self._explained
        if changed:
            self._explained = self.auto.seconds
        return changed


class MemorySchedule:
    """When a snapshot in memory is due, as `checkpoint.memory` says; by steps and by time as CheckpointSchedule.

    `auto` spends MAX_OVERHEAD on them at the beginning, when nobody knows how often the run dies. The longer it lives
    for each of its failures, the less they are worth: Young's interval then, which is longer. `earlier` are the run's
    attempts before this one.
    """

    def __init__(self, every: str | int | bool, earlier: Sequence[Attempt] = ()) -> None:
        self._steps = every if isinstance(every, int) and not isinstance(every, bool) else None
        self.seconds: float | None = None
        """Between two snapshots; None where the clock does not decide."""
        self._auto = every == "auto"
        if isinstance(every, str) and every not in ("auto", "off"):
            self.seconds = parse_seconds(every)
        elif self._auto:
            self.seconds = 0.0  # the first one at once: its cost is then known
        self._lived, self._failures = _lived(earlier), _failures(earlier)
        self._began = self._since = time.monotonic()

    @property
    def is_off(self) -> bool:
        return self._steps is None and self.seconds is None

    @property
    def margin(self) -> float:
        """For how long before a checkpoint, which lies in memory too, none is due."""
        return (self.seconds or 0.0) / 2 if self._auto else 0.0

    def restart(self) -> None:
        """Time counts from here: a snapshot has been taken, alone or with a checkpoint."""
        self._since = time.monotonic()

    def is_due_after(self, step: int) -> bool:
        """Whether the number of steps done calls for a snapshot: the same on every rank."""
        return self._steps is not None and step % self._steps == 0

    def is_due_by_time(self, until_checkpoint: float = math.inf) -> bool:
        """Whether the clock calls for a snapshot, by this process's clock, which no other rank shares; not where in
        `until_checkpoint` seconds, soon, a checkpoint is due."""
        is_due = self.seconds is not None and time.monotonic() - self._since >= self.seconds
        return is_due and until_checkpoint >= self.margin

    def observe(self, stall: float) -> None:
        """One held up the training for `stall` seconds."""
        if self._auto:
            lived = (self._lived + time.monotonic() - self._began) / (1 + self._failures)
            young = min(_young(stall, lived), MAX_SECONDS)
            self.seconds = max(young, stall / MAX_OVERHEAD, MIN_MEMORY_SECONDS)


def mean_time_between_failures(attempts: Sequence[Attempt]) -> float:
    """Seconds of run for each end that left no time to save, as far as seen, weighed with PRIOR_SECONDS once."""
    return (PRIOR_SECONDS + _lived(attempts)) / (1 + _failures(attempts))


def _lived(attempts: Sequence[Attempt]) -> float:
    return sum(max(0.0, (attempt.ended or attempt.started) - attempt.started) for attempt in attempts)


def _failures(attempts: Sequence[Attempt]) -> int:
    return sum(attempt.ended_hard for attempt in attempts)


def _young(cost: float, mtbf: float) -> float:
    """J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; all in seconds."""
    return math.sqrt(2 * cost * mtbf)


def _how_often_known(attempts: Sequence[Attempt]) -> str:
    failures = _failures(attempts)
    if failures == 0:
        return "assumed until this run has had one"
    return f"estimated: this run has had {failures}"


@dataclass
class AutoInterval:
    """`checkpoint.every: auto`: the time between two checkpoints, from what one costs and how often the run dies."""

    mtbf: float
    """Mean time between failures, in seconds."""
    known_by: str = "assumed until this run has had one"
    """Where that is from, in words."""
    cost: float | None = None
    """Seconds for which a checkpoint holds up the training; None before the first."""
    durable: float = 0.0
    """Seconds until one is on the disk."""

    def observe(self, stall: float, seconds: float) -> None:
        self.cost = stall if self.cost is None else 0.5 * (self.cost + stall)
        self.durable = max(seconds, 0.5 * (self.durable + seconds))

    @property
    def seconds(self) -> float:
        """Young's interval, at most MAX_SECONDS or what MAX_OVERHEAD asks for, at least what the disk can take."""
        if self.cost is None:
            return FIRST_SECONDS
        longest = max(MAX_SECONDS, self.cost / MAX_OVERHEAD)
        return max(min(_young(self.cost, self.mtbf), longest), 2 * self.durable)

    def explain(self) -> str:
        """What a person is told of the interval and its reasons, in a line."""
        cost = "not known yet" if self.cost is None else f"{self.cost:.2g} s each"
        return (
            f"a checkpoint every {self.seconds:.3g} s from here on: the training waits little for them ({cost}), and a "
            f"failure repeats little. One failure in {format_seconds(self.mtbf)} is {self.known_by}"
        )
