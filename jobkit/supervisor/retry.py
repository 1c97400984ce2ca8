"""The decision after an attempt: a pure function of the attempts so far, the YAML's limits, and the job's nodes.

    attempts + RetryConfig + RestartOptions (nodes, time left) --decide()--> Decision(action, reason, pause, avoid)

`closing.end_attempt` calls it and journals the decision; the supervisor carries it out. Four notions decide:

    program    a type of error that only a programmer mends: `retry.crash` tries                  then failed
    proof      the same death in the same step of two attempts that had done steps before it      then failed
    patience   everything else is tried for `retry.patience`, with growing pauses                 then interrupted
    evidence   what speaks against a node: twice, and the run avoids that node                    goes on

It prefers, in this order: the same nodes, a spare, fewer nodes (`min_nodes`), the queue, a new job.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jobkit.config.schema import UNLIMITED, RetryConfig
from jobkit.duration import format_seconds
from jobkit.run.records import AttemptEnded, Cause, Next
from jobkit.run.status import Attempt
from jobkit.supervisor.evidence import AVOID_SECONDS, avoided, avoided_before, follows_rank, is_of_one_node, stayed
from jobkit.supervisor.tries import DEATHS, STAYS, Tries, end_of

BUDGETS: Mapping[Cause, str] = {
    "preempted": "preemption",
    "unknown": "preemption",  # most often a signal that nobody explains
    "timeout": "time_limit",
    "node_failure": "node_failure",
    "crashed": "crash",
    "killed": "crash",
    "out_of_memory": "crash",
    "hang": "crash",
}
"""The key of `retry:` for each cause; any other cause ends the job, and a person decides. Of `crash` only errors of a
programmer's type count; `retry.patience` ends the rest."""

PAUSES = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before the next attempt, by the number of tries since progress, for a patience of PATIENCE_SECONDS or more.
A shorter patience shortens them in proportion."""

PATIENCE_SECONDS = 3600.0

SPREAD = 0.2
"""The most by which a pause is longer, from a hash of the run: a thousand runs do not meet one server at once."""

AT_START_SECONDS = 5.0
"""The pause before the one more try of a run that fails on every node and has never done a step."""

COMMAND_PAUSES = (2.0, 60.0)
"""The pauses of a `command:` that reports no steps: it has `retry.crash` tries, and nobody knows how far it came."""

FEWEST_TRIES = 4
"""Patience ends after so many tries at least: the start of a large model may take a quarter of an hour."""

KEEP_SECONDS = 600.0
"""A job that has paused for so long since progress gives its nodes back for the next pause; --notify says it."""

_ADVICE: Mapping[Cause, str] = {
    "timeout": "raise resources.time",
    "out_of_memory": "use a smaller batch or ask for more memory",
    "hang": "the stacks of all ranks are in the logs; raise `watchdog` if a step may take that long",
}


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """The possibilities of the job after an attempt; the allocation knows it."""

    in_place: Callable[[frozenset[str]], bool] = lambda without: False
    """Whether the job runs on, has time left, and has enough nodes without these (`min_nodes` at least)."""
    requeue: Literal["requeue", "successor", "none"] = "none"
    """How the run gets into the queue again; `none` on this machine, which has no queue."""
    spares: int = 0
    """How many unused nodes of the job stand by."""
    elsewhere: Callable[[frozenset[str]], bool] = lambda without: True
    """Whether another start of the job could have enough nodes without these. False where Slurm does not answer: a job
    that excludes too many nodes waits for ever."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The step after an attempt, and its reason: a line for the journal and the user."""

    action: Next
    reason: str
    pause: float = 0.0
    """Seconds until the next attempt may begin."""
    rotate: bool = False
    """True where the next attempt gives each node the ranks of its neighbour: a sick node keeps its deaths then."""
    tries: int = 0
    """Deaths since progress."""
    waited: float = 0.0
    """Seconds that the run has waited since, with the pause."""
    patience: float | None = None
    """Seconds of waiting that are left, before the run is interrupted; None where patience does not count."""
    gave_up: bool = False
    """True where patience ended. Until the run makes progress, each further submission has one try."""
    before_step: int | None = None
    """The next attempt begins with a state older than this step: the newest is that very step, and proves nothing."""
    avoid: Mapping[str, float] = field(default_factory=dict)
    """The nodes that the run avoids from here on, each until a time in seconds since the epoch."""


def decide(
    attempts: Sequence[Attempt], retry: RetryConfig, options: RestartOptions, *, command: bool = False
) -> Decision:
    """Return what follows the last of a run's attempts, which has ended.

    Counts and clock begin with a submission of a person's. `command` is True for a YAML's `command:`, which reports no
    steps unless it calls jobkit.init.
    """
    last, tries = end_of(attempts[-1]), Tries(attempts, command)
    what = f"{last.cause}: {last.error}" if last.error else last.cause
    before = avoided_before(attempts)
    if last.cause == "setup":
        return _after_failed_setup(tries, what, before, options)
    if last.cause not in BUDGETS:
        failed = end_of(attempts[-2]) if len(attempts) > 1 and last.last_step is None else None
        pause = f", while it waited after: {failed.reason}" if failed is not None and failed.next_at else ""
        return Decision(action="stop", reason=f"{what}{pause}", avoid=before)
    if words := _reason_to_fail(tries, retry):
        advice = f": {_ADVICE[last.cause]}" if last.cause in _ADVICE else ""
        return Decision(action="fail", reason=f"{what}; {words}{advice}", avoid=before)
    avoid = avoided(tries, lambda without: options.spares > 0 and options.in_place(without))
    may_requeue = options.requeue != "none"
    stays = last.cause in STAYS or not may_requeue
    if words := _reason_to_give_up(tries, retry):
        only = tries.only_node
        if only is None or not may_requeue or not options.elsewhere(frozenset([only])):
            reason = f"{words}: {what}"
            waited = max(tries.waited, tries.gave_up_after)
            return Decision(action="stop", reason=reason, gave_up=True, waited=waited, avoid=before)
        avoid, stays = {**avoid, only: last.time + AVOID_SECONDS}, False
        what = f"{words}, one more try on another node: {what}"
    in_place, avoid = _place(options, avoid, before, stays)
    new = [node for node in avoid if node not in before]
    is_last_chance = tries.is_silent or (not tries.has_trained and _fails_at_start(last))  # then patience says nothing
    has_patience = last.cause in DEATHS and retry.patience != UNLIMITED and not is_last_chance
    seconds = _pause(tries, retry)
    gives_back = may_requeue and tries.paused + seconds > KEEP_SECONDS * _scale(retry) and _is_durable(last)
    return Decision(
        action="in_place" if in_place and not gives_back else "stop" if options.requeue == "none" else options.requeue,
        reason=f"{what}; from now on without {', '.join(new)}" if new else what,
        pause=seconds if in_place else 0.0,
        rotate=in_place and last.evidence is None and not new and is_of_one_node(attempts[-1]),
        tries=len(tries.deaths),
        waited=tries.waited + (seconds if in_place else 0.0),
        before_step=last.step if _goes_back(tries) else None,
        patience=max(retry.patience_seconds - tries.waited, seconds) if has_patience else None,
        avoid=avoid,
    )


def _after_failed_setup(tries: Tries, what: str, before: dict[str, float], options: RestartOptions) -> Decision:
    """Return what follows a setup line that failed: one try on another node, where there is one."""
    last, lines = end_of(tries.last), [attempt for attempt in tries.fruitless if end_of(attempt).cause == "setup"]
    node = last.node
    if options.requeue == "none" or node is None or len(lines) > 1 or not options.elsewhere(frozenset([node])):
        return Decision(action="fail", reason=what, avoid=before)
    avoid = {**before, node: last.time + AVOID_SECONDS}
    return Decision(action=options.requeue, reason=f"{what}; one more try without {node}", avoid=avoid)


def _place(
    options: RestartOptions, avoid: dict[str, float], before: dict[str, float], stays: bool
) -> tuple[bool, dict[str, float]]:
    """Return whether the next attempt is in this job, and the nodes to avoid: no new ones if too few would be left."""
    if stays and options.in_place(frozenset(avoid)):
        return True, avoid
    goes_back = stays and bool(avoid) and options.in_place(frozenset())  # to a node that is to be avoided
    # Slurm is not asked where its answer changes nothing: it may take longer than the job has left.
    if (goes_back or not avoid.keys() <= before.keys()) and not options.elsewhere(frozenset(avoid)):
        return goes_back, {node: avoid[node] for node in avoid if node in before}
    return False, avoid


def _pause(tries: Tries, retry: RetryConfig) -> float:
    if not tries.has_trained and _fails_at_start(end_of(tries.last)):
        seconds = AT_START_SECONDS
    else:
        pauses = COMMAND_PAUSES if tries.is_silent else PAUSES
        seconds = pauses[min(max(len(tries.deaths) - 1, 0), len(pauses) - 1)]
    spread = zlib.crc32(tries.last.began.token.encode()) / 2**32
    return seconds * _scale(retry) * (1 + SPREAD * spread) * float(os.environ.get("JOBKIT_TEST_PAUSE", 1))


def _scale(retry: RetryConfig) -> float:
    return min(1.0, retry.patience_seconds / PATIENCE_SECONDS)


def _is_durable(last: AttemptEnded) -> bool:
    return max(last.first_step or 0, last.snapshot_step or 0) <= (last.durable_step or 0)


# When a person must act


def _reason_to_fail(tries: Tries, retry: RetryConfig) -> str | None:
    """Return why the last attempt's end would come again; None if time or another node may mend it."""
    last, ours = end_of(tries.last), list(map(end_of, tries.ours))
    kind = BUDGETS[last.cause]
    budget = {
        "preemption": retry.preemption,
        "time_limit": retry.time_limit,
        "node_failure": retry.node_failure,
        "crash": retry.crash,
    }[kind]
    if last.final:
        return "it would fail again: not retried"
    if budget == 0:
        return f"never to be restarted (retry.{kind}: 0)"
    if not tries.has_trained:
        if _fails_at_start(last) and sum(map(_fails_at_start, ours)) > 1:
            return "on every node, before the first step, twice: not retried"
        if last.nature != "outside" and any(follows_rank(ended, last) for ended in ours):
            return f"before the first step, by rank {last.rank} on another node too: not retried"
    if budget == UNLIMITED or kind == "node_failure":
        return None
    alike = [ended for ended in map(end_of, tries.counted) if BUDGETS[ended.cause] == kind]
    if kind == "crash" and not tries.is_silent:
        if (before := _proof(tries)) is not None:
            again = f"{last.signature} in step {last.step}, as in attempt {before.number}"
            return f"restarts are exact, and this was {again}: not retried (retry.crash: unlimited would)"
        alike = [ended for ended in alike if ended.nature == "program"] if last.nature == "program" else []
    if len(alike) >= int(budget):
        return f"{len(alike)} attempt(s) without progress (retry.{kind}: {budget})"
    return None


def _fails_at_start(ended: AttemptEnded) -> bool:
    """Return whether an end is an error of all nodes that time or another node will hardly mend."""
    return ended.everywhere and ended.cause != "node_failure" and ended.nature not in ("outside", "hardware")


def _proof(tries: Tries) -> Attempt | None:
    """Return an attempt that died as the last one did, where both had done steps before: so will the next one.

    An attempt that dies at once after its restore proves nothing: an outage goes on where the steps go on.
    """
    alike = [attempt for attempt in _alike(tries) if not stayed(attempt, tries.last)]
    before = [attempt for attempt in alike if _did_steps(end_of(attempt))]
    return before[-1] if before and _did_steps(end_of(tries.last)) else None


def _alike(tries: Tries) -> list[Attempt]:
    """Return the attempts before that died of the same in the same step, where time and nodes are not to blame."""
    last = end_of(tries.last)
    if None in (last.signature, last.step) or last.nature in ("outside", "hardware") or last.cause == "out_of_memory":
        return []
    ends = ((attempt, end_of(attempt)) for attempt in tries.ours[:-1])
    return [attempt for attempt, ended in ends if (ended.signature, ended.step) == (last.signature, last.step)]


def _did_steps(ended: AttemptEnded) -> bool:
    return ended.step is not None and ended.first_step is not None and ended.step > ended.first_step


def _goes_back(tries: Tries) -> bool:
    """Return whether the next attempt has to come to the step from an older state: once, until the run makes progress.

    The newest state may be that very step, as before a validation that has a typo.
    """
    has_gone_back = any(end_of(attempt).before_step is not None for attempt in tries.fruitless)
    return bool(_alike(tries)) and not _did_steps(end_of(tries.last)) and not has_gone_back


# Patience


def _reason_to_give_up(tries: Tries, retry: RetryConfig) -> str | None:
    """Return why a person shall look before the next attempt; None while time may mend it."""
    last = end_of(tries.last)
    if last.cause not in DEATHS:
        return None
    if tries.gave_up_after >= retry.patience_seconds:  # else the person has more patience now
        return "gave up again, without progress since patience ended"
    if tries.waited < retry.patience_seconds or len(tries.deaths) < FEWEST_TRIES:
        return None
    failures = sum(end_of(attempt).cause == "node_failure" for attempt in tries.fruitless)
    if last.cause == "node_failure" and (retry.node_failure == UNLIMITED or failures < int(retry.node_failure)):
        return None
    return f"gave up after {format_seconds(tries.waited)} ({len(tries.deaths)} tries)"
