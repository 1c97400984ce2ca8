"""Where the wall time of a run went: pure arithmetic on the times that its journal holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """One attempt in times (seconds since the epoch) and steps; None where it did not get that far."""

    queued: float | None
    started: float
    resumed: float | None
    last_seen: float | None
    """When it was last known to have done a step; None where it said itself that it ended."""
    ended: float | None
    first_step: int
    last_step: int
    stalled: float
    """Seconds for which checkpoints held up the loop."""


@dataclass(frozen=True)
class Account:
    """Where one attempt's time went, in seconds, and what it did, in steps."""

    steps: int
    """Steps done that no attempt had done before."""
    repeated_steps: int
    """Steps that an attempt before had done and lost."""
    queue: float
    startup: float
    """From the start of its processes to the beginning of the loop."""
    useful: float
    """Computing new steps."""
    repeated: float
    """Computing repeated ones."""
    checkpoints: float
    """Held up by checkpoints."""
    ending: float
    """From the last step that is known of to the end: unnoticed hangs, dying nodes."""
    until: float
    """When the account was closed, in seconds since the epoch."""


def account(span: Span, best_before: int) -> Account:
    """The account of an attempt; `best_before` is the last step that any attempt before it had done."""
    until = span.ended or span.last_seen or span.resumed or span.started
    queue = max(0.0, span.started - span.queued) if span.queued is not None else 0.0
    if span.resumed is None:
        return Account(0, 0, queue, max(0.0, until - span.started), 0.0, 0.0, 0.0, 0.0, until)
    last_seen = min(max(span.last_seen or until, span.resumed), until)
    stalled = min(span.stalled, last_seen - span.resumed)
    training = last_seen - span.resumed - stalled
    done = span.last_step - span.first_step
    repeated = max(0, min(span.last_step, best_before) - span.first_step)
    again = training * repeated / done if done else 0.0
    return Account(
        steps=done - repeated,
        repeated_steps=repeated,
        queue=queue,
        startup=max(0.0, span.resumed - span.started),
        useful=training - again,
        repeated=again,
        checkpoints=stalled,
        ending=until - last_seen,
        until=until,
    )


def goodput(accounts: Sequence[Account], first_start: float) -> float | None:
    """Useful step time over the wall time since the first start; None before there is any."""
    wall = max((account.until for account in accounts), default=first_start) - first_start
    return sum(account.useful for account in accounts) / wall if wall > 0 else None
