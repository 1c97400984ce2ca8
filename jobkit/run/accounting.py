"""Where the wall time of a run went: pure arithmetic on the times that its journal holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """From the last step that is known of to the end: unnoticed hangs, dying nodes, a first step that was not done."""
    until: float
    """When the account was closed, in seconds since the epoch."""
    lost_steps: int = 0
    """New steps that no checkpoint of a run that has stopped holds: whoever continues it does them again."""
    lost: float = 0.0
    """Computing those."""


def account(
    *,
    queued: float | None,
    started: float,
    resumed: float | None,
    last_seen: float | None,
    ended: float | None,
    steps: range,
    stalled: float,
    best_before: int,
    kept: int | None = None,
) -> Account:
    """The account of an attempt, from its times in seconds since the epoch: None where it did not get that far.

    Args:
        last_seen: when it was last known to have done a step; None where it said itself that it ended.
        steps: from the first that it began with to the last that it did.
        stalled: seconds for which checkpoints held up the loop.
        best_before: the last step that any attempt before it had done.
        kept: the step of the newest checkpoint of a run that has stopped; None while what it has done may be kept yet.
    """
    until = ended or last_seen or resumed or started
    queue = max(0.0, started - queued) if queued is not None else 0.0
    if resumed is None:
        return Account(0, 0, queue, max(0.0, until - started), 0.0, 0.0, 0.0, 0.0, until)
    last_seen = min(max(last_seen or until, resumed), until) if steps else resumed
    stalled = min(stalled, last_seen - resumed)
    training = last_seen - resumed - stalled
    repeated = max(0, min(steps.stop, best_before) - steps.start)
    lost = 0 if kept is None else max(0, steps.stop - max(steps.start, best_before, kept))
    again = training * repeated / len(steps) if steps else 0.0
    in_vain = training * lost / len(steps) if steps else 0.0
    return Account(
        steps=len(steps) - repeated,
        repeated_steps=repeated,
        queue=queue,
        startup=max(0.0, resumed - started),
        useful=training - again - in_vain,
        repeated=again,
        checkpoints=stalled,
        ending=until - last_seen,
        until=until,
        lost_steps=lost,
        lost=in_vain,
    )


@dataclass(frozen=True)
class Restart:
    """What an attempt took to go on from the one before, in seconds; None for what is not known."""

    notice: float | None
    """From the last that the one before is known to have done until its supervisor knew that it had failed."""
    kill: float | None
    """Until its ranks had ended, and why was known."""
    start: float | None
    """Until the new ranks had formed their group; without the queue."""
    load: float | None
    """Until the model was built and the checkpoint read."""
    step: float | None
    """Until the first step was done."""


def restart(
    *,
    last_seen: float | None,
    noticed: float | None,
    ended: float | None,
    queue: float,
    joined: float | None,
    resumed: float | None,
    stepped: float | None,
) -> Restart:
    """The parts between two attempts, from times in seconds since the epoch and the seconds in the queue."""
    start = _between(ended, joined)
    return Restart(
        notice=_between(last_seen, noticed),
        kill=_between(noticed, ended),
        start=None if start is None else max(0.0, start - queue),
        load=_between(joined, resumed),
        step=_between(resumed, stepped),
    )


def _between(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else round(max(0.0, second - first), 3)


def goodput(accounts: Sequence[Account], first_start: float) -> float | None:
    """Useful step time over the wall time since the first start; None before there is any."""
    wall = max((account.until for account in accounts), default=first_start) - first_start
    return sum(account.useful for account in accounts) / wall if wall > 0 else None
