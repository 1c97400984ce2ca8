"""What happens to a run after an attempt has ended: a pure function of why it ended and of what came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.run.status import Attempt

REQUEUED_CAUSES = frozenset({"preempted", "timeout", "signal"})
"""Not the run's fault: it continues, however often they happen."""

MAX_TIMEOUTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Decision:
    """Whether the run is requeued, and the reason in words for the journal and the user."""

    requeue: bool
    reason: str
    failed: bool = False
    """Starting it again as it is would not help: the run has failed, though none of its ranks said so."""


def decide(cause: str, attempts: Sequence[Attempt], durable_step: int | None = None) -> Decision:
    """The decision after the last of `attempts` ended by `cause`; `durable_step` is what its checkpoints reached.

    Without it the last attempt's own last step is taken for that.
    """
    if cause not in REQUEUED_CAUSES:
        return Decision(False, cause)
    if cause == "timeout":
        fruitless = _timeouts_without_progress(attempts, durable_step)
        if fruitless >= MAX_TIMEOUTS_WITHOUT_PROGRESS:
            words = f"ran out of time {fruitless} times without finishing one step: raise resources.time"
            return Decision(False, words, failed=True)
    return Decision(True, cause)


def _timeouts_without_progress(attempts: Sequence[Attempt], durable_step: int | None) -> int:
    """How many of the last attempts ran out of time and left the run where they found it."""
    reached = durable_step if durable_step is not None else (attempts[-1].last_step or 0)
    count = 0
    for attempt in reversed(attempts):
        first = attempt.first_step or 0
        if attempt.cause != "timeout" or reached > first:
            break
        count, reached = count + 1, first
    return count
