"""What comes after an attempt: the policy, by tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from jobkit.run.config import UNLIMITED, RetryConfig
from jobkit.run.records import Failure
from jobkit.run.status import CAUSES, Attempt
from jobkit.supervisor.retry import BLAMES_NODE, BUDGETS, MANY_NODES, decide
from jobkit.worker.losses import Suspect, suspect_of

# The decision

GRACEFUL = ("preempted", "timeout", "signal", "user", "cancelled", "finished")
"""Ends at which a checkpoint of the last step is written."""


def ended(
    cause: str | None,
    first: int | None = 0,
    last: int | None = None,
    durable: int | None = None,
    submission: int = 1,
    from_memory: bool = False,
    nodes: Sequence[str] = (),
    resumed: bool = False,
    **failure: Any,
) -> Attempt:
    """An attempt from step `first` (None: it never came to its loop) to step `last`.

    `durable`, the newest checkpoint it leaves, is the last step of one that ended gracefully, else where it began.
    """
    last = first if last is None else last
    if durable is None:
        durable = (last if cause in GRACEFUL else first) or 0
    return Attempt(
        id=1,
        cluster="slurm",
        job_id="7",
        started=0.0,
        cause=cause,
        first_step=first,
        last_step=last,
        durable_step=durable,
        submission=submission,
        from_memory=from_memory,
        nodes=list(nodes),
        resumed=1.0 if resumed else None,
        failure=Failure(**failure) if failure else None,
    )


TIMEOUT_5 = ended("timeout", 5)
PREEMPTED_5 = ended("preempted", 5)
CRASH_5 = ended("crashed", 5, 7)
SPENT = [CRASH_5] * 3


def from_memory(first: int, durable: int = 0) -> Attempt:
    return ended("killed", first, first + 3, durable, from_memory=True)


def evaluated(step: int, samples: int, durable: int | None = None, place: int = 0) -> Attempt:
    """One without a loop, or with the one step before an evaluation, that left so much of that to the next."""
    first = durable if durable is not None else step or None
    attempt = ended("timeout", first, step, first or 0)
    attempt.evaluated_step, attempt.evaluated_place, attempt.evaluated = step, place, samples
    return attempt


DECISIONS: list[tuple[str, Sequence[Attempt], bool]] = [
    # Snapshots in memory
    ("deaths, each with a newer snapshot", [ended("killed", 0, 20), *map(from_memory, range(20, 90, 10))], True),
    ("three deaths, after which the snapshot is the same", [ended("killed", 0, 20), *[from_memory(20)] * 3], False),
    ("two deaths, after which it is the same", [ended("killed", 0, 20), *[from_memory(20)] * 2], True),
    (
        "deaths at one step, each with a snapshot one step newer",
        [ended("killed", 0, 60), *[ended("killed", first, 60, 0, from_memory=True) for first in range(50, 53)]],
        False,
    ),
    ("one that was newer once and is no more", [from_memory(20), ended("killed", 0), from_memory(20)], False),
    ("a checkpoint newer than the snapshot", [*[from_memory(20)] * 2, from_memory(20, 30), from_memory(30)], True),
    # What ends an attempt, once
    ("preempted", [ended("preempted", 0, 5)], True),
    ("a signal of somebody's own", [ended("signal", 0, 5)], True),
    ("out of time", [ended("timeout", 0, 5)], True),
    ("a node died", [ended("node_failure", 0, 5)], True),
    ("vanished", [ended("lost", 0, 5)], True),
    ("without an end in the journal", [ended(None, 0, 5)], True),
    ("crashed", [ended("crashed", 0, 5)], True),
    ("killed", [ended("killed", 0, 5)], True),
    ("out of memory", [ended("out_of_memory", 0, 5)], True),
    ("hung", [ended("hang", 0, 5)], True),
    # What is final, or for a person
    ("finished", [ended("finished", 0, 5)], False),
    ("cancelled", [ended("cancelled", 0, 5)], False),
    ("stopped by its user", [ended("user", 0, 5)], False),
    ("the disk is full", [ended("disk", 0, 5)], False),
    ("a script that ended without finish", [ended("left", 0, 5)], False),
    ("something new", [ended("eaten", 0, 5)], False),
    # Time limits
    ("out of time a hundred times, each a step further", [ended("timeout", n, n + 1) for n in range(100)], True),
    ("out of time without a step, once", [TIMEOUT_5], True),
    ("out of time without a step, twice", [TIMEOUT_5] * 2, True),
    ("out of time without a step, once too often", [TIMEOUT_5] * 3, False),
    ("out of time before the loop, once too often", [ended("timeout", None)] * 3, False),
    ("a preemption between does not help", [TIMEOUT_5, TIMEOUT_5, PREEMPTED_5, TIMEOUT_5], False),
    ("a preemption that got further does", [TIMEOUT_5, TIMEOUT_5, ended("preempted", 5, 6), ended("timeout", 6)], True),
    ("a step between starts the count anew", [TIMEOUT_5, TIMEOUT_5, ended("timeout", 5, 6), ended("timeout", 6)], True),
    ("steps long ago do not help", [ended("timeout", 0, 5), *[TIMEOUT_5] * 3], False),
    ("a step that no checkpoint holds is none", [ended("timeout", 5, 6, durable=5)] * 3, False),
    ("out of time in an evaluation that goes on, ten times", [evaluated(0, 7 * n) for n in range(1, 10)], True),
    ("out of time in one that goes no further", [evaluated(0, 7)] * 4, False),
    ("out of time in one that begins again each time", [evaluated(0, 0)] * 3, False),
    (
        "out of time in the evaluation of a later step",
        [*[evaluated(5, 70)] * 3, evaluated(6, 7, durable=5), *[evaluated(6, 7, durable=5)] * 2],
        True,
    ),
    (
        "out of time in the evaluation before the loop, then in the step",
        [evaluated(0, 70), *[evaluated(0, 7 * n, place=1) for n in (1, 2, 3, 4)]],
        True,
    ),
    (
        "out of time before the loop again",
        [*[evaluated(0, 7, place=1)] * 2, *[evaluated(0, 70)] * 2],
        False,
    ),
    # Preemptions
    ("preempted, for the hundredth time and with nothing done", [ended("preempted", 0)] * 100, True),
    ("signals for the hundredth time", [ended("signal", 0)] * 100, True),
    # Nodes
    ("nodes died nine times without progress", [ended("node_failure", 5)] * 9, True),
    ("nodes died ten times without progress", [ended("node_failure", 5)] * 10, False),
    ("vanished and died, ten times in all", [ended("node_failure", 5), ended("lost", 5)] * 5, False),
    ("nodes died twenty times, each a checkpoint further", [ended("lost", n, n, n + 1) for n in range(20)], True),
    # Crashes
    ("crashed twice", [CRASH_5] * 2, True),
    ("crashed thrice", SPENT, False),
    ("crashed, killed and hung", [CRASH_5, ended("killed", 5), ended("hang", 5)], False),
    ("crashed twice, and then out of time", [CRASH_5, CRASH_5, TIMEOUT_5], True),
    ("crashed and timed out in turn, neither thrice", [CRASH_5, TIMEOUT_5] * 2, True),
    ("crashed and timed out in turn, the one thrice", [CRASH_5, TIMEOUT_5, CRASH_5, TIMEOUT_5, CRASH_5], False),
    ("crashed and preempted in turn, without progress", [CRASH_5, PREEMPTED_5] * 2 + [CRASH_5], False),
    ("crashed and preempted in turn, the preemption last", [CRASH_5, PREEMPTED_5] * 3, True),
    ("crashed thrice, and left a newer checkpoint", [CRASH_5, CRASH_5, ended("crashed", 5, 9, durable=8)], True),
    ("crashed thrice since", [ended("crashed", 0, 9, durable=5), *[CRASH_5] * 3], False),
    ("crashed twice since", [ended("crashed", 0, 9, durable=5), *[CRASH_5] * 2], True),
    (
        "an older checkpoint again is no progress",
        [ended("crashed", 0, 9, durable=8), *[ended("crashed", 4, 8, 8)] * 3],
        False,
    ),
    ("crashed before the loop, with a checkpoint there", [ended("crashed", None, None, durable=50)] * 3, False),
    ("crashed before the loop, twice, likewise", [ended("crashed", None, None, durable=50)] * 2, True),
    # One step that fails again and again
    ("one step failed twice", [ended("crashed", n, 9, n + 1, step=9) for n in range(2)], True),
    (
        "one step failed thrice, each from a newer checkpoint",
        [ended("crashed", n, 9, n + 1, step=9) for n in range(3)],
        False,
    ),
    ("other steps failed", [ended("crashed", n, n + 1, n + 1, step=n) for n in range(9)], True),
    ("one step failed, others between", [ended("crashed", n, 9, n + 1, step=9 - n % 2) for n in range(4)], True),
    (
        "one step failed thrice, others between",
        [ended("crashed", n, 9, n + 1, step=9 - n % 2) for n in range(5)],
        False,
    ),
    (
        "one step failed thrice, for memory the last time",
        [ended("crashed", n, 9, n + 1, step=9) for n in range(2)] + [ended("out_of_memory", 2, 9, 3, step=9)],
        False,
    ),
    ("kills that know of no step", [ended("killed", n, 9, n + 1, rank=1) for n in range(9)], True),
    # An exception on every node
    ("everywhere, before the first step", [ended("crashed", None, everywhere=True)], False),
    ("everywhere, in the first step", [ended("crashed", 0, 0, step=0, everywhere=True)], False),
    ("everywhere, later", [ended("crashed", 0, 1, step=1, everywhere=True)], True),
    ("on one node alone, before the first step", [ended("crashed", None, everywhere=False)], True),
    (
        "everywhere, but it has worked before",
        [ended("preempted", 0, 5), ended("crashed", None, durable=5, everywhere=True)],
        True,
    ),
    ("what would fail again, after progress", [ended("crashed", 0, 9, 5, final=True)], False),
    ("what would fail again, on its only node", [ended("crashed", None, nodes=["node1"], final=True)], False),
    ("everywhere, and a preemption before", [ended("preempted", None), ended("crashed", None, everywhere=True)], False),
    # A person's submission counts anew
    ("spent, and submitted again", [*SPENT, ended("crashed", 5, submission=2)], True),
    ("spent twice", [*SPENT, *[ended("crashed", 5, submission=2)] * 3], False),
    (
        "submitted again, and dead before the loop",
        [*SPENT, *[ended("crashed", None, durable=5, submission=2)] * 3],
        False,
    ),
    (
        "everywhere, before the first step of what was submitted again",
        [ended("preempted", 0, 5), ended("crashed", None, durable=5, submission=2, everywhere=True)],
        False,
    ),
    (
        "one step, thrice in all, but not since it was submitted",
        [ended("crashed", n, 9, n + 1, step=9, submission=1 + n // 2) for n in range(3)],
        True,
    ),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_what_comes_after_an_attempt(attempts: Sequence[Attempt], again: bool) -> None:
    decision = decide(attempts)
    assert decision.action == ("requeue" if again else "stop")
    assert decision.reason
    assert decision.failed == (not again and (attempts[-1].cause in BUDGETS))


# A command that reports nothing

QUIET_TIMEOUT, QUIET_CRASH = ended("timeout", None), ended("crashed", None)
QUIET_PREEMPTION, QUIET_SIGNAL = ended("preempted", None), ended("signal", None)
NOT_FOUND = ended("crashed", None, error="no such program", everywhere=True)

SILENT: list[tuple[str, Sequence[Attempt], bool]] = [
    ("out of time for the hundredth time", [QUIET_TIMEOUT] * 100, True),
    ("three crashes in a row", [QUIET_CRASH] * 3, False),
    ("three kills and hangs in a row", [QUIET_CRASH, ended("killed", None), ended("hang", None)], False),
    ("three crashes, a time limit between", [QUIET_CRASH, QUIET_CRASH, QUIET_TIMEOUT, QUIET_CRASH], True),
    ("three crashes, a preemption between", [QUIET_CRASH, QUIET_PREEMPTION, QUIET_CRASH, QUIET_CRASH], True),
    ("three crashes, a signal between", [QUIET_CRASH, QUIET_CRASH, QUIET_SIGNAL, QUIET_CRASH], False),
    ("a hundred signals", [QUIET_SIGNAL] * 100, True),
    ("three crashes since a time limit", [QUIET_TIMEOUT, *[QUIET_CRASH] * 3], False),
    ("three crashes, a dead node between", [QUIET_CRASH, QUIET_CRASH, ended("lost", None), QUIET_CRASH], False),
    ("ten dead nodes in a row", [ended("node_failure", None)] * 10, False),
    ("ten dead nodes, a time limit between", [*[ended("lost", None)] * 9, QUIET_TIMEOUT, ended("lost", None)], True),
    ("no such program", [NOT_FOUND], False),
    ("no such program after a preemption", [QUIET_PREEMPTION, NOT_FOUND], False),
    ("no such program, though it has run till the time limit", [QUIET_TIMEOUT, NOT_FOUND], True),
    ("one that reports its steps", [ended("timeout", 5, resumed=True)] * 3, False),
    ("one that reported its steps once", [ended("timeout", 5, resumed=True), *[QUIET_TIMEOUT] * 2], False),
    (
        "one that reported its steps before it was submitted again",
        [ended("timeout", 5, resumed=True), *[ended("timeout", None, durable=5, submission=2)] * 3],
        True,
    ),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in SILENT], ids=[row[0] for row in SILENT])
def test_a_command_that_reports_nothing_is_not_judged_by_its_silence(attempts: Sequence[Attempt], again: bool) -> None:
    decision = decide(attempts, is_command=True)
    assert (decision.action, decision.failed) == (("requeue", False) if again else ("stop", True))


def test_a_command_that_reports_nothing_may_be_forbidden_to_run_out_of_time() -> None:
    assert decide([QUIET_TIMEOUT], RetryConfig(time_limit=0), is_command=True).failed


def test_a_time_limit_ends_the_growing_pauses_of_a_command_that_reports_nothing() -> None:
    attempts = [*[ended("killed", None)] * 2, QUIET_TIMEOUT, ended("killed", None)]
    assert decide(attempts, is_command=True, keeps_nodes=lambda without: True).pause == 0


def test_a_command_that_signals_end_again_and_again_waits_longer_each_time() -> None:
    attempts = [QUIET_SIGNAL] * 4
    pauses = [decide(attempts[:n], is_command=True, keeps_nodes=lambda without: True).pause for n in (1, 2, 3, 4)]
    assert pauses == sorted(set(pauses)) and pauses[0] == 0


BUDGET_ROWS: list[tuple[str, RetryConfig, Sequence[Attempt], bool]] = [
    ("no preemption allowed", RetryConfig(preemption=0), [ended("preempted", 0, 5)], False),
    ("no signal allowed", RetryConfig(preemption=0), [ended("signal", 0, 5)], False),
    ("no time limit allowed", RetryConfig(time_limit=0), [ended("timeout", 0, 5)], False),
    ("no dead node allowed", RetryConfig(node_failure=0), [ended("lost", 0, 5, 5)], False),
    ("no crash allowed", RetryConfig(crash=0), [ended("crashed", 0, 5, 5)], False),
    ("no crash allowed, but a preemption", RetryConfig(crash=0), [PREEMPTED_5], True),
    ("no crash allowed, and none came last", RetryConfig(crash=0), [CRASH_5, PREEMPTED_5], True),
    ("one, with progress", RetryConfig(crash=1), [ended("crashed", 0, 9, 5)], True),
    ("one, without progress", RetryConfig(crash=1), [CRASH_5], False),
    ("one, with progress, in a known step", RetryConfig(crash=1), [ended("crashed", 0, 9, 5, step=9)], False),
    ("two preemptions allowed, one", RetryConfig(preemption=2), [PREEMPTED_5], True),
    ("two preemptions allowed, two", RetryConfig(preemption=2), [PREEMPTED_5, ended("signal", 5)], False),
    ("two preemptions allowed, many with progress", RetryConfig(preemption=2), [ended("preempted", 0, 5)], True),
    ("unlimited crashes", RetryConfig(crash=UNLIMITED), [CRASH_5] * 100, True),
    ("unlimited crashes in one step", RetryConfig(crash=UNLIMITED), [ended("crashed", 5, 9, step=9)] * 100, True),
    (
        "unlimited crashes, but everywhere and at once",
        RetryConfig(crash=UNLIMITED),
        [ended("crashed", None, everywhere=True)],
        False,
    ),
    ("unlimited time limits", RetryConfig(time_limit=UNLIMITED), [TIMEOUT_5] * 100, True),
    ("unlimited dead nodes", RetryConfig(node_failure=UNLIMITED), [ended("lost", 5)] * 100, True),
    ("finished, with budgets left", RetryConfig(crash=UNLIMITED), [ended("finished", 0, 5)], False),
    ("cancelled, with budgets left", RetryConfig(preemption=UNLIMITED), [ended("cancelled", 0, 5)], False),
]


@pytest.mark.parametrize(
    ("retry", "attempts", "again"), [row[1:] for row in BUDGET_ROWS], ids=[row[0] for row in BUDGET_ROWS]
)
def test_a_budget_is_what_the_yaml_says(retry: RetryConfig, attempts: Sequence[Attempt], again: bool) -> None:
    assert (decide(attempts, retry).action == "requeue") == again


def test_every_cause_of_a_budget_or_a_blame_is_one_that_is_explained() -> None:
    assert set(BUDGETS) <= set(CAUSES)
    assert set(BLAMES_NODE) <= set(BUDGETS)
    assert set(BUDGETS.values()) | {"exclude_after", "in_place"} == set(RetryConfig.__dataclass_fields__)


@pytest.mark.parametrize("attempts", [[PREEMPTED_5], [TIMEOUT_5], [CRASH_5]])
def test_a_job_that_cannot_be_requeued_is_followed_by_a_new_one(attempts: list[Attempt]) -> None:
    assert decide(attempts, can_requeue=False).action == "resubmit"


@pytest.mark.parametrize("attempts", [[ended("cancelled")], SPENT])
def test_a_run_that_has_ended_is_not_followed_by_a_new_job_either(attempts: list[Attempt]) -> None:
    assert decide(attempts, can_requeue=False).action == "stop"


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        ([TIMEOUT_5] * 3, ["timeout", "3 attempt(s) without progress", "retry.time_limit: 3", "raise resources.time"]),
        (
            [ended("crashed", 5, error="rank 1: ValueError: no")] * 3,
            ["rank 1: ValueError: no", "3 attempt(s) without progress", "retry.crash: 3"],
        ),
        ([ended("out_of_memory", 5)] * 3, ["smaller batch"]),
        ([ended("hang", 5)] * 3, ["hang", "stacks", "watchdog"]),
        ([ended("node_failure", 5)] * 10, ["node_failure", "retry.node_failure: 10"]),
        (
            [ended("crashed", n, 9, n + 1, step=9, error="NaN") for n in range(3)],
            ["NaN", "step 9 failed 3 times", "retry.crash: 3"],
        ),
        ([ended("crashed", None, everywhere=True, error="ImportError")], ["ImportError", "before the first step"]),
    ],
)
def test_a_run_that_fails_says_what_happened_by_which_rule_and_what_to_change(
    attempts: list[Attempt], said: list[str]
) -> None:
    reason = decide(attempts).reason
    assert "\n" not in reason
    for part in said:
        assert part in reason


def test_a_budget_of_nothing_says_so() -> None:
    assert "retry.crash: 0" in decide([CRASH_5], RetryConfig(crash=0)).reason


# Alone on a node


def failed_on(*nodes: str, submission: int = 1) -> Attempt:
    """An attempt that all its nodes ended alike before the first step."""
    return ended("crashed", None, submission=submission, nodes=nodes, node=nodes[0], error="no", everywhere=True)


ALONE: list[tuple[str, Sequence[Attempt], Sequence[str], tuple[str, tuple[str, ...]]]] = [
    ("once", [failed_on("node1")], (), ("requeue", ("node1",))),
    ("and on another node", [failed_on("node1"), failed_on("node2")], ("node1",), ("stop", ())),
    ("and on the same node again", [failed_on("node1"), failed_on("node1")], (), ("requeue", ("node1",))),
    ("once, and decided before", [failed_on("node1")], ("node1",), ("requeue", ())),
    ("on two nodes", [failed_on("node1", "node2")], (), ("stop", ())),
    ("on this machine", [ended("crashed", None, error="no", everywhere=True)], (), ("stop", ())),
    (
        "before it was submitted again",
        [failed_on("node1"), failed_on("node2"), failed_on("node1", submission=2)],
        (),
        ("requeue", ("node1",)),
    ),
]


@pytest.mark.parametrize(
    ("attempts", "excluded", "expected"), [row[1:] for row in ALONE], ids=[row[0] for row in ALONE]
)
def test_what_fails_at_once_on_its_only_node_is_tried_on_one_other(
    attempts: Sequence[Attempt], excluded: Sequence[str], expected: tuple[str, tuple[str, ...]]
) -> None:
    decision = decide(attempts, excluded=excluded)
    assert (decision.action, decision.exclude) == expected
    assert decision.failed == (decision.action == "stop")


def test_what_fails_at_once_on_its_only_node_has_failed_where_no_other_one_can_be_had() -> None:
    decision = decide([failed_on("node1")], can_replace=lambda nodes: False)
    assert decision.failed and "before the first step" in decision.reason


def test_what_fails_at_once_on_its_only_node_is_tried_on_a_spare_first() -> None:
    decision = decide([failed_on("node1")], keeps_nodes=lambda without: True, can_replace=lambda nodes: False)
    assert (decision.action, decision.exclude) == ("in_place", ("node1",))


def test_a_scheduler_that_does_not_answer_has_not_said_that_there_is_no_other_node() -> None:
    decision = decide([failed_on("node1")], can_replace=lambda nodes: None)
    assert (decision.action, decision.exclude) == ("requeue", ())


def test_what_may_never_crash_is_not_tried_on_another_node() -> None:
    assert decide([failed_on("node1")], RetryConfig(crash=0)).failed


# Nodes to keep away from


def killed_on(*nodes: str, cause: str = "killed", submission: int = 1, **failure: Any) -> list[Attempt]:
    """Attempts with progress that ended for what happened on one node, one after the other."""
    return [
        ended(cause, 10 * n, 10 * n + 9, 10 * n + 5, submission, node=node, **failure) for n, node in enumerate(nodes)
    ]


EXCLUSIONS: list[tuple[str, Sequence[Attempt], Sequence[str], tuple[str, ...]]] = [
    ("once is chance", killed_on("node2"), [], ()),
    ("twice is not", killed_on("node2", "node2"), [], ("node2",)),
    ("another one between", killed_on("node2", "node3", "node2"), [], ("node2",)),
    ("each once", killed_on("node1", "node2", "node3"), [], ()),
    ("two at once", killed_on("node3", "node2", "node2", "node3"), ["node2"], ("node3",)),
    ("several, in order", killed_on("node3", "node2", "node2", "node3"), [], ("node2", "node3")),
    ("excluded before", killed_on("node2", "node2", "node2"), ["node2"], ()),
    ("excluded before, among others", killed_on("node2", "node2"), ["node1", "node2"], ()),
    ("by several causes", [*killed_on("node2"), *killed_on("node2", cause="node_failure")], [], ("node2",)),
    ("a node that died twice", killed_on("node2", "node2", cause="node_failure"), [], ("node2",)),
    ("hung twice", killed_on("node2", "node2", cause="hang"), [], ("node2",)),
    ("an exception on it alone", killed_on("node2", "node2", cause="crashed", everywhere=False), [], ("node2",)),
    ("an exception everywhere", killed_on("node2", "node2", cause="crashed", everywhere=True), [], ()),
    ("preempted there", killed_on("node2", "node2", cause="preempted"), [], ()),
    ("vanished", [ended("lost", 0, 5, 5)] * 2, [], ()),
    ("nobody knows where", [ended("killed", 0, 5, 5, rank=3)] * 2, [], ()),
    ("locally, where nodes have no names", [ended("killed", 0, 5, 5, node=None)] * 2, [], ()),
    (
        "before it was submitted again",
        [*killed_on("node2"), *killed_on("node2", submission=2)],
        [],
        (),
    ),
]


@pytest.mark.parametrize(
    ("attempts", "excluded", "exclude"), [row[1:] for row in EXCLUSIONS], ids=[row[0] for row in EXCLUSIONS]
)
def test_a_node_that_fails_again_is_not_used_again(
    attempts: Sequence[Attempt], excluded: Sequence[str], exclude: tuple[str, ...]
) -> None:
    decision = decide(attempts, excluded=excluded)
    assert decision.exclude == exclude
    assert decision.action == "requeue"
    assert decide(attempts, excluded=excluded, can_requeue=False).exclude == exclude


@pytest.mark.parametrize(("after", "exclude"), [(1, ("node2",)), (2, ()), (3, ())])
def test_the_yaml_says_how_often_a_node_may_fail(after: int, exclude: tuple[str, ...]) -> None:
    assert decide(killed_on("node2"), RetryConfig(exclude_after=after)).exclude == exclude


def test_a_run_that_is_not_started_again_excludes_nothing() -> None:
    attempts = [ended("killed", 5, node="node2")] * 3
    assert (decide(attempts).action, decide(attempts).exclude) == ("stop", ())


# On the nodes that the job has


def kept(*attempts: Attempt, enough: bool = True, **retry: Any) -> tuple[str, float, tuple[str, ...]]:
    """(action, pause, nodes to exclude) where the job goes on running, and has enough nodes or not."""
    decision = decide(attempts, RetryConfig(**retry), keeps_nodes=lambda without: enough)
    return decision.action, decision.pause, decision.exclude


@pytest.mark.parametrize("cause", ["killed", "crashed", "out_of_memory", "hang", "node_failure", "lost", "signal"])
def test_what_fails_by_itself_starts_again_in_place(cause: str) -> None:
    assert kept(ended(cause, 0, 5)) == ("in_place", 0.0, ())
    assert kept(ended(cause, 0, 5), enough=False)[0] == "requeue"
    assert kept(ended(cause, 0, 5), in_place=False)[0] == "requeue"


@pytest.mark.parametrize("cause", ["preempted", "timeout"])
def test_a_job_that_is_to_make_room_gives_its_nodes_back(cause: str) -> None:
    assert kept(ended(cause, 0, 5))[0] == "requeue"


def test_budgets_hold_in_place_too() -> None:
    assert kept(*SPENT)[0] == "stop"


def test_restarts_without_progress_wait_longer_and_longer_and_progress_begins_anew() -> None:
    pauses = [kept(*[ended("lost", 5)] * count)[1] for count in range(1, 10)]
    assert pauses == [0, 2, 5, 15, 30, 60, 60, 60, 60]
    assert kept(ended("lost", 5), ended("lost", 5), ended("lost", 5, 9, durable=8), ended("lost", 8))[1] == 0


def test_a_bad_node_is_left_out_where_there_is_another_one() -> None:
    failures = [ended("killed", 0, 5, node="node2", rank=1)] * 2
    assert kept(*failures) == ("in_place", 2.0, ("node2",))
    asked: list[Sequence[str]] = []
    decision = decide(failures, keeps_nodes=lambda without: bool(asked.append(without)))
    assert (decision.action, decision.exclude, asked[0]) == ("requeue", ("node2",), ("node2",))


def test_a_bad_node_that_nothing_could_replace_is_kept() -> None:
    failures = [ended("killed", 0, 5, node="node2", rank=1)] * 2
    none_beside = {"keeps_nodes": lambda without: not without, "can_replace": lambda nodes: False}
    decision = decide(failures, **none_beside)  # type: ignore[arg-type]
    assert (decision.action, decision.exclude) == ("in_place", ())
    decision = decide(failures, RetryConfig(in_place=False), **none_beside)  # type: ignore[arg-type]
    assert (decision.action, decision.exclude) == ("requeue", ())


def test_an_excluded_node_is_not_gone_back_to_while_the_job_could_have_another_one() -> None:
    lost = ended("node_failure", 0, 5, node="node3")
    asked: list[Sequence[str]] = []

    def keeps(without: Sequence[str]) -> bool:
        asked.append(without)
        return not without  # with the excluded one there are enough

    decision = decide([lost], excluded=["node2"], keeps_nodes=keeps)
    assert (decision.action, asked) == ("requeue", [("node2",), ()])
    for answer in (False, None):  # no other node, or nobody to ask
        decision = decide(
            [lost], excluded=["node2"], keeps_nodes=keeps, can_replace=lambda nodes, answer=answer: answer
        )
        assert decision.action == "in_place"


@pytest.mark.parametrize("cause", ["timeout", "preempted", "node_failure"])
def test_a_scheduler_that_is_ending_the_job_is_not_asked_what_changes_nothing(cause: str) -> None:
    asked: list[Sequence[str]] = []

    def replace(nodes: Sequence[str]) -> bool:
        return bool(asked.append(nodes))

    ends = {"keeps_nodes": lambda without: False, "can_replace": replace}
    assert decide([ended(cause, 0, 5)], excluded=["node2"], **ends).action == "requeue"  # type: ignore[arg-type]
    assert not asked


MANY = [f"node{number}" for number in range(MANY_NODES)]


def crashed_on(node: str, rank: int | None, **more: Any) -> Attempt:
    return ended("crashed", None, nodes=MANY, node=node, rank=rank, **more)


BROKEN = [
    ("another node's GPU, after one that is excluded", [("a", 0), ("a", 0), ("b", 8)], ["a"], True),
    ("two of another one's", [("a", 0), ("a", 0), ("b", 8), ("b", 8)], ["a", "b"], True),
    ("an error that follows its rank to another node", [("a", 0), ("a", 0), ("b", 0)], ["a"], False),
    ("an error of a rank that nobody knows", [("a", None), ("a", None), ("b", None)], ["a"], False),
    ("a node that is not excluded", [("a", 0), ("a", 0), ("a", 0)], [], False),
    (
        "five nodes, one after the other",
        [(node, rank) for rank, node in enumerate("abcde") for _ in "12"],
        "abcde",
        False,
    ),
]


@pytest.mark.parametrize(
    ("crashes", "excluded", "goes_on"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_crashes_on_nodes_that_are_excluded_since_count_as_failures_of_nodes(
    crashes: Sequence[tuple[str, int | None]], excluded: Sequence[str], goes_on: bool
) -> None:
    decision = decide([crashed_on(*one) for one in crashes], excluded=excluded)
    assert (decision.action != "stop") is goes_on


def until_it_stops(
    crashes: Iterable[tuple[str, int]], cause: str = "crashed", nodes: Sequence[str] = MANY, **retry: Any
) -> list[str]:
    """The nodes that were excluded when crashes without progress, on (node, rank), have come to an end."""
    attempts: list[Attempt] = []
    excluded: list[str] = []
    for node, rank in crashes:
        attempts.append(ended(cause, 5, nodes=nodes, node=node, rank=rank))
        decision = decide(attempts, RetryConfig(**retry), excluded=excluded)
        if decision.action == "stop":
            return excluded
        excluded += decision.exclude
    raise AssertionError(f"goes on after {len(attempts)} attempts")


@pytest.mark.parametrize("after", [1, 2])
def test_crashes_that_wander_over_the_nodes_end_when_those_have_spent_their_budget(after: int) -> None:
    wandering = [(f"node{number // after}", number) for number in range(100)]
    excluded = until_it_stops(wandering, exclude_after=after)
    assert len(excluded) * after == RetryConfig().node_failure
    assert len(until_it_stops(wandering, exclude_after=after, node_failure=4)) * after == 4


def test_memory_that_is_too_small_is_the_runs_fault_on_every_node() -> None:
    wandering = [(f"node{number // 2}", number) for number in range(100)]
    assert until_it_stops(wandering, "out_of_memory") == ["node0"]


def test_what_fails_on_every_node_alike_is_not_the_fault_of_an_excluded_one() -> None:
    assert decide([crashed_on("a", 0, everywhere=True)] * 3, excluded=["a"]).failed


@pytest.mark.parametrize("nodes", [["a"], ["a", "b"]])
def test_where_a_job_of_few_nodes_crashes_tells_nothing_of_them(nodes: Sequence[str]) -> None:
    """As a `command:` of eight ranks with a mistake, any of which is the first to exit."""
    wandering = [(f"node{number // 2}", number) for number in range(100)]
    assert until_it_stops(wandering, nodes=nodes) == ["node0"]


def test_broken_gpus_of_two_nodes_may_fail_in_the_same_step() -> None:
    attempts = [crashed_on(*one, step=5) for one in [("a", 0), ("a", 0), ("b", 8)]]
    assert not decide(attempts, excluded=["a"]).failed
    assert decide([*attempts, attempts[-1], crashed_on("c", 8, step=5)], excluded=["a", "b"]).failed


def test_a_node_that_has_computed_wrongly_is_excluded_at_once() -> None:
    fault = ended("crashed", 4, 5, node="b", faulty_node="b", error="HardwareFault")
    decision = decide([fault], keeps_nodes=lambda without: "b" in without)
    assert (decision.action, decision.exclude) == ("in_place", ("b",))


def test_which_step_is_repeated_of_the_attempts_before() -> None:
    bad, other = ended("crashed", 4, 6, step=6, node="b", not_finite=True), ended("preempted", 4, 5)
    assert suspect_of([bad], 1) == suspect_of([bad, other], 1) == Suspect(6, "b")
    assert suspect_of([bad], 2) is None, "a person has looked at it since"
    assert suspect_of([bad, ended("preempted", 4, 9)], 1) is None, "it was repeated"
    fault = ended("crashed", 4, 6, step=6, faulty_node="b")
    assert suspect_of([bad, fault, other], 1) is None, "it had another result"
    assert suspect_of([other, ended("crashed", 4, 6, step=6)], 1) is None
