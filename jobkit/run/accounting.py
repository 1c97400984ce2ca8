"""Where the wall time of a run went: arithmetic on the times in its Status, for `status` and `list`.

    queued ----> began ----> first step ----> last report ----> ended
           queue     starting       stepping            ending
                                    (new and repeated steps)

Goodput is the time of new steps over the wall time since the first start, the queue between attempts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Computing new steps."""
    ending: float = 0.0
    """From its last report to its end: a hang, a dying node, the last checkpoint."""
    first_step: int | None = None
    last_step: int | None = None
    repeated_steps: int = 0

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
    for attempt in status.attempts:
        best = max((account.last_step or 0 for account in result), default=0)
        result.append(_account(attempt, progress, now or 0.0, best))
    return result


def goodput(accounts: Sequence[Account]) -> float | None:
    """Return the share of useful time in the wall time since the first start; None before any step."""
    if not any(account.last_step is not None for account in accounts):
        return None
    wall = accounts[-1].until - accounts[0].began
    return sum(account.useful for account in accounts) / wall if wall > 0 else None


def _account(attempt: Attempt, progress: Progress | None, now: float, best: int) -> Account:
    """The account of an attempt; `best` is the last step of those before."""
    began, ended = attempt.began.time, attempt.ended
    if progress is None or progress.attempt != attempt.number:
        progress = Progress(attempt=attempt.number, time=0.0)
    until = ended.time if ended is not None else max(now, progress.time, began)
    seen = ended.last_seen if ended is not None else progress.time
    last = ended.last_step if ended is not None else progress.step
    first, loop = (ended or progress).first_step, (ended or progress).loop_began
    queue = max(0.0, began - attempt.queued) if attempt.queued else 0.0
    account = Account(attempt=attempt.number, began=began, until=until, queue=queue, starting=max(0.0, until - began))
    if first is None or last is None:
        return account
    loop = min(max(loop or began, began), until)
    seen = min(max(seen or until, loop), until)
    steps, repeated = max(0, last - first), max(0, min(last, best) - first)
    a_step = (seen - loop) / steps if steps else 0.0
    return replace(
        account,
        starting=loop - began,
        useful=a_step * (steps - repeated),
        ending=until - seen,
        first_step=first,
        last_step=last,
        repeated_steps=repeated,
    )
