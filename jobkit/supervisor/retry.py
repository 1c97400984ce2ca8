"""What happens to a run after an attempt has ended: a pure function of why it ended and of what came before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from jobkit.run.config import UNLIMITED, RetryConfig
from jobkit.run.records import Failure
from jobkit.run.status import Attempt

Action = Literal["in_place", "requeue", "resubmit", "stop"]
"""`in_place` starts the ranks again on the nodes that the job has; the others give those back."""

BUDGETS = {
    "preempted": "preemption",
    "signal": "preemption",
    "timeout": "time_limit",
    "node_failure": "node_failure",
    "lost": "node_failure",
    "crashed": "crash",
    "out_of_memory": "crash",
    "killed": "crash",
    "hang": "crash",
}
"""Which budget of `retry:` an attempt's cause draws on; any other cause is final, or for a person to decide."""

NODE_FAILURE = "node_failure"
"""The budget of what was a node's fault."""

BLAMES_NODE = frozenset({"node_failure", "killed", "crashed", "out_of_memory", "hang"})
"""Causes that count against a node, where one node was the first to fail."""

LEAVES_NODES = frozenset({"node_failure", "killed", "crashed", "out_of_memory", "hang", "lost", "signal"})
"""Causes after which the job may still have its nodes."""

MANY_NODES = 8
"""Of how many nodes an attempt has to be for two crashes on the same one to tell of that node: on a single node every
crash is there, on two every other."""

PAUSES = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before a restart in place, by how many attempts in a row were without progress before: what fails at once is
not mended by trying faster, and may be mended by time."""

_ADVICE = {
    "timeout": "raise resources.time",
    "out_of_memory": "use a smaller batch or ask for more memory",
    "hang": "the stacks of all ranks are in the logs; raise `watchdog` if a step may take that long",
}


@dataclass(frozen=True)
class Decision:
    """What to do about a run, and why: a text for the journal and the user."""

    action: Action
    reason: str
    failed: bool = False
    """Only with `stop`: starting it again as it is would not help."""
    exclude: tuple[str, ...] = ()
    """Nodes not to use from here on, beside those excluded before."""
    pause: float = 0.0
    """Seconds to wait before a restart in place."""


CanReplace = Callable[[Sequence[str]], bool | None]
"""Whether another start of the job could have other nodes than some; None where the scheduler does not answer."""


def decide(
    attempts: Sequence[Attempt],
    retry: RetryConfig | None = None,
    *,
    is_command: bool = False,
    excluded: Sequence[str] = (),
    can_requeue: bool = True,
    keeps_nodes: Callable[[Sequence[str]], bool] = lambda without: False,
    can_replace: CanReplace = lambda nodes: True,
) -> Decision:
    """The decision after the last of `attempts` has ended, by budgets that a newer checkpoint fills up again.

    `is_command` is whether they ran a YAML's `command:`, which reports nothing unless it calls jobkit.init. `excluded`
    are the nodes excluded before; `can_requeue` is whether the scheduler would take the job back, else a new job has to
    follow it. `keeps_nodes` is whether the job goes on running and has enough nodes, without those that it is given.
    """
    retry = retry or RetryConfig()
    last = attempts[-1]
    cause = last.cause or "lost"
    if cause not in BUDGETS:
        return Decision("stop", cause)
    if last.failure is not None and last.failure.final:
        return Decision("stop", f"{_what_happened(last)} (would fail again: not retried)", failed=True)
    own = [attempt for attempt in attempts if attempt.submission == last.submission]
    is_silent = is_command and all(attempt.resumed is None for attempt in own)
    fruitless = _since_silent_progress(own) if is_silent else _since_progress(own)
    never_began = _has_never_begun(own, is_silent)
    only_node = _only_node_tried(own) if never_began else None
    if never_began and only_node is None:
        return _not_retried(last)
    if words := _reason_to_stop(own, fruitless, retry, excluded):
        return Decision("stop", words, failed=True)
    bad = _bad_nodes(own, retry.exclude_after, excluded)
    if only_node is not None and only_node not in (*excluded, *bad):
        bad = (*bad, only_node)
    in_place = retry.in_place and cause in LEAVES_NODES
    avoided = (*excluded, *bad)
    goes_on = in_place and keeps_nodes(avoided)
    if avoided and not goes_on:
        goes_back = in_place and keeps_nodes(())  # to a node that is to be avoided
        # Not asked where it changes nothing: a Slurm that is ending the job may take longer to answer than it leaves.
        if (bad or goes_back) and not (replaceable := can_replace(avoided)):
            if only_node in bad and replaceable is False:
                return _not_retried(last)
            bad, goes_on = (), goes_back  # a run that no node is left for would wait for ever
    if goes_on:
        pause = PAUSES[min(max(len(fruitless) - 1, 0), len(PAUSES) - 1)]
        return Decision("in_place", cause, exclude=bad, pause=pause)
    again: Action = "requeue" if can_requeue else "resubmit"
    return Decision(again, cause, exclude=bad)


def _has_never_begun(attempts: Sequence[Attempt], is_silent: bool) -> bool:
    """Whether all nodes of the last attempt failed alike, and no attempt has done anything yet."""
    failure = attempts[-1].failure
    if failure is None or not failure.everywhere:
        return False
    return not any(_has_trained(one) or (is_silent and one.cause == "timeout") for one in attempts)


def _only_node_tried(attempts: Sequence[Attempt]) -> str | None:
    """The node that the run was alone on whenever all its nodes failed alike: another one may do better."""
    failed = [one for one in attempts if one.failure is not None and one.failure.everywhere]
    tried = {tuple(one.nodes) for one in failed}
    (nodes, *others) = tried
    return nodes[0] if len(nodes) == 1 and not others else None


def _not_retried(last: Attempt) -> Decision:
    words = f"{_what_happened(last)} (before the first step, on every node: not retried)"
    return Decision("stop", words, failed=True)


def _what_happened(attempt: Attempt) -> str:
    return (attempt.failure.error if attempt.failure else None) or str(attempt.cause)


def _reason_to_stop(
    attempts: Sequence[Attempt], fruitless: Sequence[Attempt], retry: RetryConfig, excluded: Collection[str]
) -> str | None:
    """Why one more attempt would end like the last ones; None where it may not. `fruitless` are those since the last
    progress; `excluded` are the nodes excluded before."""
    last = attempts[-1]
    kinds = [_budget_of(attempt, attempts, excluded) for attempt in attempts]
    kind = kinds[-1]
    failure = last.failure or Failure()
    what = _what_happened(last)
    advice = f": {_ADVICE[str(last.cause)]}" if last.cause in _ADVICE else ""
    if getattr(retry, str(kind)) == 0:
        return f"{what}; never to be restarted (retry.{kind}: 0){advice}"
    # Of a node's budget too, whatever came last: what crashes there counts for it only when the node is excluded.
    for name in dict.fromkeys((kind, NODE_FAILURE)):
        budget = getattr(retry, str(name))
        without_progress = kinds[len(kinds) - len(fruitless) :].count(name)
        if budget != UNLIMITED and 0 < without_progress >= budget:
            return f"{what}; {without_progress} attempt(s) without progress (retry.{name}: {budget}){advice}"
    if kind == "crash" and retry.crash != UNLIMITED and failure.step is not None:
        crashes = [one for one, of in zip(attempts, kinds, strict=True) if of != NODE_FAILURE]
        same = sum(one.failure is not None and one.failure.step == failure.step for one in crashes)
        if same >= int(retry.crash):
            return f"{what}; step {failure.step} failed {same} times (retry.crash: {retry.crash}){advice}"
    return None


def _budget_of(attempt: Attempt, attempts: Sequence[Attempt], excluded: Collection[str]) -> str | None:
    """Which budget an attempt's end counts for.

    A crash on a node of many that is excluded since counts as that node's failure, as long as the same rank has crashed
    on no other node: several broken GPUs of a large job are not the run's fault. What follows a rank from node to node
    is, and what all nodes failed of; and memory that is too small, since any of the ranks may be the first to say so.
    """
    kind = BUDGETS.get(attempt.cause or "lost")
    failure = attempt.failure
    if kind != "crash" or failure is None or failure.rank is None or failure.node not in excluded:
        return kind
    if failure.everywhere or attempt.cause == "out_of_memory" or len(attempt.nodes) < MANY_NODES:
        return kind
    failures = [one.failure for one in attempts if one.failure is not None and one.cause in BLAMES_NODE]
    follows_rank = any(one.rank == failure.rank and one.node != failure.node for one in failures)
    return kind if follows_rank else NODE_FAILURE


def _has_trained(attempt: Attempt) -> bool:
    """Whether a step was behind it, its own or one of a checkpoint: it may have died before it could report any."""
    reached = attempt.last_step, attempt.first_step, attempt.failure.step if attempt.failure else None
    return any(step is not None and step > 0 for step in reached)


def _since_progress(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The last attempts, none of which left a checkpoint newer than those before, or more of an evaluation.

    A snapshot in memory counts as one where the attempt that left it came further than all before it: one step after
    the other, up to the one that fails, is no progress.
    """
    best, first, furthest, evaluated = 0, 0, 0, (0, 0, 0)
    for number, attempt in enumerate(attempts):
        came_to = attempts[number - 1].last_step or 0 if number else 0  # the one that left the snapshot
        if attempt.from_memory and came_to > furthest and (attempt.first_step or 0) > best:
            first, best = number, attempt.first_step or 0
        furthest = max(furthest, came_to)
        # One that never resumed found the checkpoints that are there, and made none.
        if attempt.first_step is not None and attempt.durable_step > max(best, attempt.first_step):
            first = number + 1
        if (known := (attempt.evaluated_step, attempt.evaluated_place, attempt.evaluated)) > evaluated:
            first, evaluated = number + 1, known
        best = max(best, attempt.durable_step)
    return attempts[first:]


def _since_silent_progress(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The last attempts of a command that reports nothing, all of which failed.

    One that the scheduler had to end was running: nobody knows how far it came, so it is not held against the run. Of
    one that another program ended by a signal, which may be what ends each of them, that is not said.
    """
    first = 0
    for number, attempt in enumerate(attempts, start=1):
        if attempt.cause in ("preempted", "timeout"):
            first = number
    return attempts[first:]


def _bad_nodes(attempts: Sequence[Attempt], limit: int, excluded: Sequence[str]) -> tuple[str, ...]:
    failures = [attempt.failure for attempt in attempts if attempt.failure and attempt.cause in BLAMES_NODE]
    # The same error on all nodes is no node's fault.
    blamed = Counter(one.node for one in failures if one.node and not one.everywhere)
    faulty = {one.faulty_node for one in failures if one.faulty_node}
    often = {node for node, count in blamed.items() if count >= limit}
    return tuple(node for node in sorted(often | faulty) if node not in excluded)
