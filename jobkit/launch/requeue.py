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


def decide(cause: str, attempts: Sequence[Attempt]) -> Decision:
    """The decision after the last of `attempts` ended by `cause`."""
    if cause not in REQUEUED_CAUSES:
        return Decision(False, cause)
    if cause == "timeout":
        fruitless = _timeouts_without_progress(attempts)
        if fruitless >= MAX_TIMEOUTS_WITHOUT_PROGRESS:
            words = f"ran out of time {fruitless} times without finishing one step: raise resources.time"
            return Decision(False, words, failed=True)
    return Decision(True, cause)


def _timeouts_without_progress(attempts: Sequence[Attempt]) -> int:
    count = 0
    for attempt in reversed(attempts):
        if attempt.cause != "timeout" or (attempt.last_step or 0) > (attempt.first_step or 0):
            break
        count += 1
    return count
