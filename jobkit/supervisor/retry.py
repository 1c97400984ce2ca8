"""The decision after an attempt: a pure function of the attempts so far, the YAML's limits, and the job's nodes.

    attempts + RetryConfig + Room (nodes, time left) --decide()--> Decision(action, reason, pause, avoid, rotate)

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
from functools import cached_property
from typing import Literal

from jobkit.duration import format_seconds
from jobkit.run.records import Cause, Ended, Next
from jobkit.run.schema import UNLIMITED, RetryConfig
from jobkit.run.status import Attempt

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
"""The key of `retry:` for each cause; any other cause ends the job, and a person decides."""

DEATHS: frozenset[Cause] = frozenset({"node_failure", "crashed", "killed", "out_of_memory", "hang"})

STAYS = DEATHS | {"unknown"}
"""Causes after which the job may still have its nodes."""

PAUSES = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before the next attempt, by the number of tries since progress, for a patience of PATIENCE_SECONDS or more.
A shorter patience shortens them in proportion."""

PATIENCE_SECONDS = 3600.0

SPREAD = 0.2
"""The most by which a pause is longer, from a hash of the run: a thousand runs do not meet one server at once."""

AT_START_SECONDS = 5.0
"""The pause before the one more try of a run that fails on every node and has never done a step."""

COMMAND_PAUSES = (0.0, 2.0, 60.0)
"""The pauses of a `command:` that reports no steps: it has `retry.crash` tries, and nobody knows how far it came."""

LIFE_SECONDS = 300.0
"""How much of an attempt's training counts as waiting: an attempt that trained for days has not waited that long."""

FEWEST_TRIES = 4
"""Patience ends after so many tries at least: the start of a large model may take a quarter of an hour."""

KEEP_SECONDS = 600.0
"""A job that has paused for so long since progress gives its nodes back for the next pause."""

AVOID_SECONDS, DEATHS_SECONDS = 24 * 3600.0, 3600.0
"""A node is avoided for so long; three deaths on it within so long count, whatever the progress between them."""

_ADVICE: Mapping[Cause, str] = {
    "timeout": "raise resources.time",
    "out_of_memory": "use a smaller batch or ask for more memory",
    "hang": "the stacks of all ranks are in the logs; raise `watchdog` if a step may take that long",
}


@dataclass(frozen=True, kw_only=True)
class Room:
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
    patience: float | None = None
    """Seconds of waiting that are left, before the run is interrupted; None where patience does not count."""
    gave_up: bool = False
    """True where patience ended. Until the run makes progress, each further submission has one try."""
    before_step: int | None = None
    """The next attempt begins with a state older than this step: the newest is that very step, and proves nothing."""
    avoid: Mapping[str, float] = field(default_factory=dict)
    """The nodes that the run avoids from here on, each until a time in seconds since the epoch."""


def decide(attempts: Sequence[Attempt], retry: RetryConfig, room: Room, *, command: bool = False) -> Decision:
    """Return what follows the last of a run's attempts, which has ended.

    Counts and clock begin with a submission of a person's. `command` is True for a YAML's `command:`, which reports no
    steps unless it calls jobkit.init.
    """
    last, tries = _ended(attempts[-1]), Tries(attempts, command)
    what = f"{last.cause}: {last.error}" if last.error else last.cause
    known = _known(attempts)
    if last.cause not in BUDGETS:
        return Decision(action="stop", reason=what, avoid=known)
    if words := _reason_to_fail(tries, retry):
        advice = f": {_ADVICE[last.cause]}" if last.cause in _ADVICE else ""
        return Decision(action="fail", reason=f"{what}; {words}{advice}", avoid=known)
    avoid = _avoided(tries, room)
    stays = last.cause in STAYS or room.requeue == "none"
    if words := _reason_to_give_up(tries, retry):
        only = tries.only_node
        if only is None or room.requeue == "none" or not room.elsewhere(frozenset([only])):
            return Decision(action="stop", reason=f"{words}: {what}", gave_up=True, avoid=known)
        avoid, stays = {**avoid, only: last.time + AVOID_SECONDS}, False
        what = f"{words}, one more try on another node: {what}"
    new = [node for node in avoid if node not in known]
    in_place = stays and room.in_place(frozenset(avoid))
    if avoid and not in_place:
        goes_back = stays and room.in_place(frozenset())  # to a node that is to be avoided
        # Slurm is not asked where its answer changes nothing: it may take longer than the job has left.
        if (new or goes_back) and not room.elsewhere(frozenset(avoid)):
            avoid, in_place, new = {node: avoid[node] for node in avoid if node in known}, goes_back, []
    is_death = last.cause in DEATHS
    seconds = _pause(tries, retry)
    gives_back = room.requeue != "none" and tries.paused + seconds > KEEP_SECONDS * _scale(retry) and _is_durable(last)
    return Decision(
        action="in_place" if in_place and not gives_back else "stop" if room.requeue == "none" else room.requeue,
        reason=f"{what}; from now on without {', '.join(new)}" if new else what,
        pause=seconds if in_place else 0.0,
        rotate=in_place and last.evidence is None and not new and _is_of_one_node(attempts[-1]),
        tries=len(tries.deaths),
        before_step=last.step if _goes_back(tries) else None,
        patience=max(0.0, retry.patience_seconds - tries.waited) if is_death and retry.patience != UNLIMITED else None,
        avoid=avoid,
    )


def _ended(attempt: Attempt) -> Ended:
    assert attempt.ended is not None, f"attempt {attempt.number} has not ended"
    return attempt.ended


def _pause(tries: Tries, retry: RetryConfig) -> float:
    if not tries.has_trained and _fails_at_start(_ended(tries.last)):
        seconds = AT_START_SECONDS
    else:
        pauses = COMMAND_PAUSES if tries.is_silent else PAUSES
        seconds = pauses[min(max(len(tries.deaths) - 1, 0), len(pauses) - 1)]
    spread = zlib.crc32(tries.last.began.token.encode()) / 2**32
    return seconds * _scale(retry) * (1 + SPREAD * spread) * float(os.environ.get("JOBKIT_TEST_PAUSE", 1))


def _scale(retry: RetryConfig) -> float:
    return min(1.0, retry.patience_seconds / PATIENCE_SECONDS)


def _is_durable(last: Ended) -> bool:
    return max(last.first_step or 0, last.snapshot_step or 0) <= (last.durable_step or 0)


# Tries: the attempts since progress, and the clock


class Tries:
    """The attempts of a submission, and those of them that count.

    Progress is a newer state than all before: a checkpoint, or a snapshot in memory. A snapshot shows in the step where
    the next attempt begins; of the last attempt, in its own report. An attempt that died has made progress only if it
    came further than all before, and trained for as long as its start and the pause before it took.
    """

    def __init__(self, attempts: Sequence[Attempt], command: bool) -> None:
        self.all, self.last = attempts, attempts[-1]
        self.ours = [attempt for attempt in attempts if attempt.submission == self.last.submission]
        self.is_silent = command and all(_ended(attempt).first_step is None for attempt in self.ours)
        """True for a `command:` that reports no steps."""
        # Nobody knows how far a silent program came. It was running, at least, until the scheduler ended it.
        stops = [_ended(attempt).cause in ("preempted", "timeout") for attempt in self.ours]
        made = stops if self.is_silent else _progress(self.ours)
        first = max((number for number, is_progress in enumerate(made, start=1) if is_progress), default=0)
        self.fruitless = self.ours[first:]
        """Those since the last one that made progress."""
        self.deaths = [attempt for attempt in self.ours[max(0, first - 1) :] if _ended(attempt).cause in STAYS]
        """The same that nobody asked for; first the death of the attempt that made progress, if it died."""

    @cached_property
    def has_trained(self) -> bool:
        """Whether the run had a step by then, its own or a checkpoint's: a death may come before a report."""
        ends = map(_ended, self.ours)
        return any((step or 0) > 0 for ended in ends for step in (ended.last_step, ended.first_step, ended.step))

    @cached_property
    def _after(self) -> list[tuple[Attempt, Attempt]]:
        """The attempts after the first of the deaths, each with the one before it."""
        pairs = zip(self.ours, self.ours[1:], strict=False)
        return [pair for pair in pairs if self.deaths and pair[1].number > self.deaths[0].number]

    @cached_property
    def waited(self) -> float:
        """Seconds of waiting for better weather since the first of the deaths; the queue is none, nor is training."""
        return self.paused + sum(_start(one) + min(_trained(one), LIFE_SECONDS) for _, one in self._after)

    @cached_property
    def paused(self) -> float:
        return sum(_pause_before(one, before) for before, one in self._after)

    @cached_property
    def only_node(self) -> str | None:
        """The node on which all deaths were, in a job of one node; None where the ranks were elsewhere too."""
        used = {node for attempt in self.deaths for node in attempt.nodes}
        return used.pop() if len(used) == 1 else None


def _progress(attempts: Sequence[Attempt]) -> list[bool]:
    made, best, furthest = [], 0, 0
    for number, attempt in enumerate(attempts):
        ended = _ended(attempt)
        first, durable, last = ended.first_step, ended.durable_step or 0, ended.last_step or 0
        following = _ended(attempts[number + 1]).first_step if number + 1 < len(attempts) else None
        best = max(best, first or 0)
        # An attempt that never came to its loop found the checkpoints that are there, and made none.
        newer = first is not None and durable > best
        if last > furthest:
            newer |= (following if following is not None else ended.snapshot_step or 0) > best
        if ended.cause in DEATHS:
            pause = _pause_before(attempt, attempts[number - 1]) if number else 0.0
            newer &= last > furthest and _trained(attempt) >= _start(attempt) + pause
        made.append(newer)
        best, furthest = max(best, durable), max(furthest, last)
    return made


def _start(attempt: Attempt) -> float:
    """Return the seconds until an attempt's first step; all of them where it came to none."""
    ended = _ended(attempt)
    return max(0.0, (ended.loop_began or ended.time) - attempt.began.time)


def _trained(attempt: Attempt) -> float:
    ended = _ended(attempt)
    return max(0.0, ended.time - (ended.loop_began or ended.time))


def _pause_before(attempt: Attempt, before: Attempt) -> float:
    """Return the seconds between two attempts; of those in the queue the pause that was meant."""
    ended = _ended(before)
    most = None if attempt.began.how == "in place" else (ended.next_at or ended.time) - ended.time
    seconds = max(0.0, attempt.began.time - ended.time)
    return seconds if most is None else min(seconds, most)


# When a person must act


def _reason_to_fail(tries: Tries, retry: RetryConfig) -> str | None:
    """Return why the last attempt's end would come again; None if time or another node may mend it."""
    last, ours = _ended(tries.last), list(map(_ended, tries.ours))
    kind = BUDGETS[last.cause]
    budget = getattr(retry, kind)
    if last.final:
        return "it would fail again: not retried"
    if budget == 0:
        return f"never to be restarted (retry.{kind}: 0)"
    if not tries.has_trained:
        if _fails_at_start(last) and sum(map(_fails_at_start, ours)) > 1:
            return "on every node, before the first step, twice: not retried"
        if last.nature != "outside" and any(_follows_rank(ended, last) for ended in ours):
            return f"before the first step, by rank {last.rank} on another node too: not retried"
    if budget == UNLIMITED or kind == "node_failure":
        return None
    alike = [ended for ended in map(_ended, tries.fruitless) if BUDGETS[ended.cause] == kind]
    if kind == "crash" and not tries.is_silent:
        if (before := _proof(tries)) is not None:
            again = f"{last.signature} in step {last.step}, as in attempt {before.number}"
            return f"restarts are exact, and this was {again}: not retried"
        alike = [ended for ended in alike if ended.nature == "program"] if last.nature == "program" else []
    if len(alike) >= budget:
        return f"{len(alike)} attempt(s) without progress (retry.{kind}: {budget})"
    return None


def _fails_at_start(ended: Ended) -> bool:
    """Return whether an end is an error of all nodes that time or another node will hardly mend."""
    return ended.everywhere and ended.cause != "node_failure" and ended.nature not in ("outside", "hardware")


def _proof(tries: Tries) -> Attempt | None:
    """Return an attempt that died as the last one did, where both had done steps before: so will the next one.

    An attempt that dies at once after its restore proves nothing: an outage goes on where the steps go on.
    """
    alike = [attempt for attempt in _alike(tries) if not _stayed(attempt, tries.last)]
    before = [attempt for attempt in alike if _did_steps(_ended(attempt))]
    return before[-1] if before and _did_steps(_ended(tries.last)) else None


def _alike(tries: Tries) -> list[Attempt]:
    """Return the attempts before that died of the same in the same step, where time and nodes are not to blame."""
    last = _ended(tries.last)
    if last.signature is None or last.step is None or last.nature in ("outside", "hardware"):
        return []
    ends = ((attempt, _ended(attempt)) for attempt in tries.ours[:-1])
    return [attempt for attempt, ended in ends if (ended.signature, ended.step) == (last.signature, last.step)]


def _did_steps(ended: Ended) -> bool:
    return ended.step is not None and ended.first_step is not None and ended.step > ended.first_step


def _goes_back(tries: Tries) -> bool:
    """Return whether the next attempt has to come to the step from an older state: once, until the run makes progress.

    The newest state may be that very step, as before a validation that has a typo.
    """
    has_gone_back = any(_ended(attempt).before_step is not None for attempt in tries.fruitless)
    return bool(_alike(tries)) and not _did_steps(_ended(tries.last)) and not has_gone_back


# Patience


def _reason_to_give_up(tries: Tries, retry: RetryConfig) -> str | None:
    """Return why a person shall look before the next attempt; None while time may mend it."""
    last, earlier = _ended(tries.last), tries.all[: len(tries.all) - len(tries.ours)]
    if last.cause not in DEATHS:
        return None
    if earlier and _ended(earlier[-1]).gave_up and len(tries.fruitless) == len(tries.ours):
        return "gave up again, without progress since patience ended"
    if tries.waited < retry.patience_seconds or len(tries.deaths) < FEWEST_TRIES:
        return None
    failures = sum(_ended(attempt).cause == "node_failure" for attempt in tries.fruitless)
    if last.cause == "node_failure" and (retry.node_failure == UNLIMITED or failures < int(retry.node_failure)):
        return None
    return f"gave up after {format_seconds(tries.waited)} ({len(tries.deaths)} tries)"


# Nodes


def _avoided(tries: Tries, room: Room) -> dict[str, float]:
    """Return the nodes to avoid: those from before, and the last one if enough speaks against it."""
    last, attempts = _ended(tries.last), tries.all
    avoid = _known(attempts)
    if len(avoid) >= max(2, len(tries.last.nodes) // 10) or not _speaks_against_node(attempts, tries.last):
        return avoid
    against = [one for one in attempts if _ended(one).node == last.node and _speaks_against_node(attempts, one)]
    fruitless = [one for one in against if one in tries.deaths]
    recent = [one for one in against if last.time - _ended(one).time <= DEATHS_SECONDS]
    has_spare = last.evidence and room.spares and room.in_place(frozenset([*avoid, str(last.node)]))
    if len(fruitless) >= 2 or len(recent) >= 3 or has_spare:
        avoid[str(last.node)] = last.time + AVOID_SECONDS
    return avoid


def _known(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the nodes that are avoided from before, as long as that holds."""
    now = _ended(attempts[-1]).time
    known = _ended(attempts[-2]).avoid if len(attempts) > 1 else {}
    return {node: until for node, until in known.items() if until > now and not _is_cleared(node, attempts)}


def _is_cleared(node: str, attempts: Sequence[Attempt]) -> bool:
    """Return whether a rank that had died on a node died alike on another one."""
    ends = list(map(_ended, attempts))
    return any(_follows_rank(other, ended) for ended in ends if ended.node == node for other in ends)


def _speaks_against_node(attempts: Sequence[Attempt], attempt: Attempt) -> bool:
    """Return whether an attempt's end is evidence against its node. It is none where the error followed its rank to
    another node, or where other nodes of the same job had that error too, as in an outage."""
    ended = _ended(attempt)
    if ended.node not in attempt.nodes or _is_cleared(ended.node, attempts):
        return False
    same = [one for one in attempts if set(one.nodes) == set(attempt.nodes) and _is_alike(_ended(one), ended)]
    is_of_node = all(_ended(one).node == ended.node for one in same)
    stayed = any(_stayed(one, attempt) for one in same if one.number < attempt.number)
    return ended.evidence is not None or (is_of_node and stayed)


def _is_alike(ended: Ended, other: Ended) -> bool:
    return ended.signature is not None and ended.signature == other.signature


def _follows_rank(ended: Ended, other: Ended) -> bool:
    """Return whether a rank died alike on two nodes: neither is to blame, but where both devices say so themselves."""
    is_another = ended.node != other.node and ended.nature != "hardware"
    return is_another and _is_alike(ended, other) and ended.rank == other.rank


def _is_of_one_node(attempt: Attempt) -> bool:
    """Return whether only ranks of one node of several died: the node may be the reason, or one of its ranks."""
    ended = _ended(attempt)
    return len(attempt.nodes) > 1 and ended.alone and ended.node in attempt.nodes


def _stayed(before: Attempt, attempt: Attempt) -> bool:
    """Return whether a death came again on its node, though the node had other ranks by then."""
    one, other = _ended(before), _ended(attempt)
    moved = before.nodes != attempt.nodes and one.rank != other.rank
    return moved and _is_of_one_node(before) and _is_of_one_node(attempt) and one.node == other.node
