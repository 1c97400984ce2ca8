"""What speaks against a node: its device's word, deaths of its ranks alone, an error that stays with it.

    attempts (rotated over the nodes) --avoided()--> nodes that the run avoids, each until a time

Pure; retry.py calls it. Two pieces of evidence without progress make a run avoid a node, within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jobkit.run.records import AttemptEnded
from jobkit.run.status import Attempt
from jobkit.supervisor.tries import Tries, end_of

AVOID_SECONDS, DEATHS_SECONDS = 24 * 3600.0, 3600.0
"""A node is avoided for so long; three deaths on it within so long count, whatever the progress between them."""


def avoided(tries: Tries, has_spare: Callable[[frozenset[str]], bool]) -> dict[str, float]:
    """Return the nodes to avoid: those from before, and the last one if enough speaks against it.

    `has_spare` says whether the job has a spare, and enough nodes without some.
    """
    last, attempts = end_of(tries.last), tries.all
    avoid = avoided_before(attempts)
    if len(avoid) >= max(2, len(tries.last.nodes) // 10) or not _speaks_against_node(attempts, tries.last):
        return avoid
    against = [
        attempt for attempt in attempts if end_of(attempt).node == last.node and _speaks_against_node(attempts, attempt)
    ]
    fruitless = [attempt for attempt in against if attempt in tries.since_state]
    recent = [attempt for attempt in against if last.time - end_of(attempt).time <= DEATHS_SECONDS]
    is_spared = last.evidence is not None and has_spare(frozenset([*avoid, str(last.node)]))
    if len(fruitless) >= 2 or len(recent) >= 3 or is_spared:
        avoid[str(last.node)] = last.time + AVOID_SECONDS
    return avoid


def avoided_before(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the nodes that are avoided from before, as long as that holds."""
    now = end_of(attempts[-1]).time
    before = end_of(attempts[-2]).avoid if len(attempts) > 1 else {}
    deaths = {node: [attempt for attempt in attempts if end_of(attempt).node == node] for node in before}
    cleared = {node for node, ours in deaths.items() if ours and _has_followed_rank(ours[-1], attempts)}
    return {node: until for node, until in before.items() if until > now and node not in cleared}


def _has_followed_rank(attempt: Attempt, attempts: Sequence[Attempt]) -> bool:
    """Return whether a rank that had died on a node died alike on another one."""
    return any(follows_rank(end_of(other), end_of(attempt)) for other in attempts)


def _speaks_against_node(attempts: Sequence[Attempt], attempt: Attempt) -> bool:
    """Return whether an attempt's end is evidence against its node. It is none where the error followed its rank to
    another node, or where other nodes of the same job had that error too, as in an outage."""
    ended = end_of(attempt)
    if ended.node not in attempt.nodes or _has_followed_rank(attempt, attempts):
        return False
    same = [other for other in attempts if set(other.nodes) == set(attempt.nodes) and _is_alike(end_of(other), ended)]
    is_of_node = all(end_of(other).node == ended.node for other in same)
    has_stayed = any(stayed(other, attempt) for other in same if other.number < attempt.number)
    return ended.evidence is not None or (is_of_node and has_stayed)


def _is_alike(ended: AttemptEnded, other: AttemptEnded) -> bool:
    """Return whether two deaths are of one kind, within a day: `SIGFPE of rank 2` may be rank 0's after a rotation."""
    ours, theirs = ((end.signature or "").partition(" of rank ")[0] for end in (ended, other))
    return ours != "" and ours == theirs and abs(ended.time - other.time) <= AVOID_SECONDS


def follows_rank(ended: AttemptEnded, other: AttemptEnded) -> bool:
    """Return whether a rank died alike on two nodes: neither is to blame, but where both devices say so themselves."""
    is_another = ended.node != other.node and ended.rank == other.rank and ended.nature != "hardware"
    return is_another and _is_alike(ended, other)


def is_of_one_node(attempt: Attempt) -> bool:
    """Return whether only ranks of one node of several died: the node may be the reason, or one of its ranks."""
    ended = end_of(attempt)
    return len(attempt.nodes) > 1 and ended.alone and ended.node in attempt.nodes


def stayed(before: Attempt, attempt: Attempt) -> bool:
    """Return whether a death came again on its node, though the node had other ranks by then."""
    earlier, later = end_of(before), end_of(attempt)
    moved = before.nodes != attempt.nodes and earlier.rank != later.rank
    return moved and is_of_one_node(before) and is_of_one_node(attempt) and earlier.node == later.node
