"""Where the wall time of a run went: arithmetic on the times in its Status, for `status` and `list`.

    queued ----> began ----> first step ----> last report ----> ended
           queue     starting       stepping            ending
                                    (new, repeated and lost steps)

Goodput is the time of new steps that are kept, over the wall time since the first start, the queue between attempts
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.run.records import Progress
from jobkit.run.status import Attempt, Status


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where one attempt's time went, in seconds, and its steps."""

    attempt: int
    began: float
    until: float
    """When the account was closed, in seconds since the epoch."""
    queue: float
    starting: float
    """From the start of its processes to the first step."""
    useful: float = 0.0
    """Computing new steps that are kept."""
    repeated: float = 0.0
    """Computing steps that an attempt before had done."""
    lost: float = 0.0
    """Computing new steps that no checkpoint of a stopped run holds: whoever continues it does them again."""
    ending: float = 0.0
    """From its last report to its end: a hang, a dying node, the last checkpoint."""
    first_step: int | None = None
    last_step: int | None = None
    repeated_steps: int = 0
    lost_steps: int = 0

    @property
    def seconds(self) -> float:
        """Without the queue."""
        return self.until - self.began


def accounts(status: Status, progress: Progress | None = None, now: float | None = None) -> list[Account]:
    """Return the account of each attempt.

        accounts(status, run.progress(), time.time())[-1].useful     # 52.1

    `progress` and `now` are about the attempt that runs; an attempt without any sign of a step has only a start.
    """
    result: list[Account] = []
    best = 0
    for attempt in status.attempts:
        is_last = attempt is status.attempts[-1]
        kept = attempt.ended.durable_step or 0 if attempt.ended and is_last and _has_stopped(status) else None
        result.append(_account(attempt, progress, now, best, kept))
        best = max(best, result[-1].last_step or 0)
    return result


def goodput(accounts: Sequence[Account]) -> float | None:
    """Return the share of useful time in the wall time since the first start; None before any step."""
    if not any(account.last_step is not None for account in accounts):
        return None
    wall = accounts[-1].until - accounts[0].began
    return sum(account.useful for account in accounts) / wall if wall > 0 else None


def _has_stopped(status: Status) -> bool:
    return status.state in ("interrupted", "failed", "cancelled")


def _account(attempt: Attempt, progress: Progress | None, now: float | None, best: int, kept: int | None) -> Account:
    began, ended = attempt.began.time, attempt.ended
    if ended is not None:
        until, seen, loop = ended.time, ended.last_seen, ended.loop_began
        first, last = ended.first_step, ended.last_step
    elif progress is not None and progress.attempt == attempt.number:
        until, seen, loop = max(now or 0.0, progress.time), progress.time, progress.loop_began
        first, last = progress.first_step, progress.step
    else:
        until, seen, loop, first, last = max(now or 0.0, began), None, None, None, None
    queue = max(0.0, began - attempt.queued) if attempt.queued else 0.0
    if first is None or last is None:
        starting = max(0.0, until - began)
        return Account(attempt=attempt.number, began=began, until=until, queue=queue, starting=starting)
    loop = min(max(loop or began, began), until)
    seen = min(max(seen or until, loop), until)
    repeated, steps = max(0, min(last, best) - first), max(0, last - first)
    lost = 0 if kept is None else max(0, last - max(first, best, kept))
    a_step = (seen - loop) / steps if steps else 0.0
    return Account(
        attempt=attempt.number,
        began=began,
        until=until,
        queue=queue,
        starting=loop - began,
        useful=a_step * (steps - repeated - lost),
        repeated=a_step * repeated,
        lost=a_step * lost,
        ending=until - seen,
        first_step=first,
        last_step=last,
        repeated_steps=repeated,
        lost_steps=lost,
    )
