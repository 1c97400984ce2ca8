"""The decision after an attempt: a pure function of the attempts so far, the YAML's limits, and the job's nodes.

    attempts + RetryConfig + Room (nodes, time left) --decide()--> Decision(action, reason, exclude)

`attempt.close` calls it and journals the decision; the supervisor carries it out. It prefers, in this order: the same
nodes, a spare, fewer nodes (`min_nodes`), the queue, a new job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
"""The budget of `retry:` for each cause; any other cause ends the job, and a person decides."""

STAYS: frozenset[Cause] = frozenset({"node_failure", "crashed", "killed", "out_of_memory", "hang", "unknown"})
"""Causes after which the job may still have its nodes."""

LOOKS_LIKE_NODE: frozenset[Cause] = frozenset({"node_failure", "killed", "out_of_memory", "hang"})
"""Deaths for which a node may be to blame; an exception is the program's, as long as few nodes take part."""

MANY_NODES = 8
"""An exception counts against its node in attempts of this many nodes: on two nodes every other one is on the same."""

SECONDS_BETWEEN_DEATHS = 3600.0
"""Deaths on a node count together if the first was this long ago at most."""

PAUSES = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before a restart in place, by the number of attempts in a row without progress: time may mend the fault."""

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
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Nodes to give up, beside those excluded before: name -> why."""


def decide(
    attempts: Sequence[Attempt],
    retry: RetryConfig,
    room: Room,
    *,
    command: bool = False,
    excluded: Collection[str] = (),
) -> Decision:
    """Return what follows the last attempt, which has ended. `attempts` are those of one submission of a person's.

    `command` is True for a YAML's `command:`, which reports no steps unless it calls jobkit.init.
    """
    last = _ended(attempts[-1])
    if last.cause not in BUDGETS:
        return Decision(action="stop", reason=_what_happened(last))
    progress = _progress(attempts, command)
    fruitless = _fruitless(progress)
    if words := _reason_to_fail(attempts, fruitless, retry, excluded):
        return Decision(action="fail", reason=words)
    bad = _bad_node(attempts, progress, room, frozenset(excluded))
    stays = last.cause in STAYS or room.requeue == "none"
    avoided = frozenset([*excluded, *bad])
    in_place = stays and room.in_place(avoided)
    if avoided and not in_place:
        goes_back = stays and room.in_place(frozenset())  # to a node that is to be avoided
        # Slurm is not asked where its answer changes nothing: it may take longer than the job has left.
        if (bad or goes_back) and not room.elsewhere(avoided):
            bad, in_place = {}, goes_back
    what = "; ".join([_what_happened(last), *(f"{node} is given up: {why}" for node, why in bad.items())])
    if in_place:
        return Decision(action="in_place", reason=what, exclude=bad)
    if room.requeue == "none":
        return Decision(action="stop", reason=what, exclude=bad)
    return Decision(action=room.requeue, reason=what, exclude=bad)


def pause(attempts: Sequence[Attempt], *, command: bool = False) -> float:
    """Return how many seconds after the end of the last attempt the next one begins in place."""
    return PAUSES[min(max(_fruitless(_progress(attempts, command)) - 1, 0), len(PAUSES) - 1)]


def _ended(attempt: Attempt) -> Ended:
    assert attempt.ended is not None, f"attempt {attempt.number} has not ended"
    return attempt.ended


def _what_happened(last: Ended) -> str:
    return f"{last.cause}: {last.error}" if last.error else last.cause


# Progress


def _progress(attempts: Sequence[Attempt], command: bool) -> list[bool]:
    """Return for each attempt whether it left a newer state than all before it: a checkpoint, or a snapshot in memory.

    A snapshot shows in the step where the next attempt begins; of the last attempt, in its own report. It counts only
    if its attempt came further than all before: one step after the other, up to the step that fails, is no progress.
    """
    ends = [_ended(attempt) for attempt in attempts]
    if command and all(ended.first_step is None for ended in ends):
        # Nobody knows how far it came. It was running, at least, until the scheduler ended it.
        return [ended.cause in ("preempted", "timeout") for ended in ends]
    made, best, furthest = [], 0, 0
    for number, ended in enumerate(ends):
        first, durable, last = ended.first_step, ended.durable_step or 0, ended.last_step or 0
        following = ends[number + 1].first_step if number + 1 < len(ends) else None
        best = max(best, first or 0)
        # An attempt that never came to its loop found the checkpoints that are there, and made none.
        newer = first is not None and durable > best
        if last > furthest:
            newer |= (following if following is not None else ended.snapshot_step or 0) > best
        made.append(newer)
        best, furthest = max(best, durable), max(furthest, last)
    return made


def _fruitless(progress: Sequence[bool]) -> int:
    """Return the number of attempts since the last one that made progress."""
    return len(progress) - max((number for number, made in enumerate(progress, start=1) if made), default=0)


# When to fail


def _reason_to_fail(
    attempts: Sequence[Attempt], fruitless: int, retry: RetryConfig, excluded: Collection[str]
) -> str | None:
    """Return why another attempt would end like the last ones; None if it may not.

    `fruitless` is the number of attempts since the last progress, `excluded` are the nodes excluded before.
    """
    last = _ended(attempts[-1])
    what = _what_happened(last)
    if last.final:
        return f"{what}; it would fail again: not retried"
    if last.everywhere and not any(_has_trained(_ended(attempt)) for attempt in attempts):
        return f"{what}; on every node, before the first step: not retried"
    advice = f": {_ADVICE[last.cause]}" if last.cause in _ADVICE else ""
    kinds = [_kind(attempt, attempts, excluded) for attempt in attempts]
    kind = str(kinds[-1])
    if getattr(retry, kind) == 0:
        return f"{what}; never to be restarted (retry.{kind}: 0){advice}"
    # Node failures are always counted: an exception counts as one only once its node is excluded.
    for name in dict.fromkeys((kind, "node_failure")):
        budget, count = getattr(retry, name), kinds[len(kinds) - fruitless :].count(name)
        if budget != UNLIMITED and 0 < count >= budget:
            return f"{what}; {count} attempt(s) without progress (retry.{name}: {budget}){advice}"
    if kind == "crash" and retry.crash != UNLIMITED and last.step is not None:
        same = sum(
            of == "crash" and _ended(attempt).step == last.step for attempt, of in zip(attempts, kinds, strict=True)
        )
        if same >= int(retry.crash):
            return f"{what}; step {last.step} failed {same} times (retry.crash: {retry.crash}){advice}"
    return None


def _has_trained(ended: Ended) -> bool:
    """Return whether the run had a step by then, its own or a checkpoint's: a death may come before a report."""
    return any(step is not None and step > 0 for step in (ended.last_step, ended.first_step, ended.step))


def _kind(attempt: Attempt, attempts: Sequence[Attempt], excluded: Collection[str]) -> str | None:
    """Return the budget that an attempt's end counts for.

    A crash on a node of many that was excluded since is that node's failure: several broken GPUs of a large job are not
    the run's fault. But an error that follows its rank to another node is, and memory that is too small.
    """
    ended = _ended(attempt)
    kind = BUDGETS.get(ended.cause)
    if kind != "crash" or ended.rank is None or ended.node not in excluded or len(attempt.nodes) < MANY_NODES:
        return kind
    if ended.everywhere or ended.cause == "out_of_memory":
        return kind
    others = [_ended(other) for other in attempts if BUDGETS.get(_ended(other).cause) == "crash"]
    follows_rank = any(other.rank == ended.rank and other.node != ended.node for other in others)
    return kind if follows_rank else "node_failure"


# Nodes


def _bad_node(
    attempts: Sequence[Attempt], progress: Sequence[bool], room: Room, excluded: frozenset[str]
) -> dict[str, str]:
    """Return the node to give up after the last attempt, with the reason; nothing if it may stay."""
    last = _ended(attempts[-1])
    node = str(last.node)
    if node not in attempts[-1].nodes or node in excluded or not _blames_node(attempts[-1]):
        return {}  # on this machine an attempt has no nodes
    if last.cause in LOOKS_LIKE_NODE and room.spares and room.in_place(excluded | {node}):
        return {node: "a spare takes its place"}
    deaths = [
        number
        for number, attempt in enumerate(attempts)
        if _blames_node(attempt)
        and _ended(attempt).node == node
        and last.time - _ended(attempt).time <= SECONDS_BETWEEN_DEATHS
    ]
    if len(deaths) >= 3:
        return {node: f"{len(deaths)} deaths within an hour"}
    if len(deaths) == 2 and not any(progress[deaths[0] + 1 :]):
        return {node: "2 deaths without progress in between"}
    return {}


def _blames_node(attempt: Attempt) -> bool:
    ended = _ended(attempt)
    if ended.everywhere:  # the same error on all nodes is no node's fault
        return False
    return ended.cause in LOOKS_LIKE_NODE or (ended.cause == "crashed" and len(attempt.nodes) >= MANY_NODES)
