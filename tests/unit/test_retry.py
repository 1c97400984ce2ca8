"""What comes after an attempt: the policy, by tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import pytest

from jobkit.run.records import Began, Cause, Ended
from jobkit.run.schema import UNLIMITED, RetryConfig
from jobkit.run.status import Attempt
from jobkit.supervisor.retry import (
    BUDGETS,
    LOOKS_LIKE_NODE,
    MANY_NODES,
    PAUSES,
    STAYS,
    Decision,
    Room,
    decide,
    pause,
)

GRACEFUL = ("preempted", "timeout", "unknown", "stopped", "cancelled", "finished")
"""Ends at which a checkpoint of the last step is written."""

QUEUE = Room(requeue="requeue")
"""A job that gives its nodes back."""


def ended(
    cause: Cause,
    first: int | None = 0,
    last: int | None = None,
    durable: int | None = None,
    *,
    nodes: Sequence[str] = ("node1", "node2"),
    minute: float = 0.0,
    **facts: Any,
) -> Attempt:
    """An attempt from step `first` (None: it never came to its loop) to step `last`.

    `durable`, the newest checkpoint when it ended, is the last step of an attempt that ended gracefully, else the step
    where it began.
    """
    last = first if last is None else last
    if durable is None:
        durable = (last if cause in GRACEFUL else first) or 0
    return Attempt(
        number=1,
        submission=1,
        began=Began(attempt=1, token="t", job_id="7", nodes=list(nodes)),
        ended=Ended(
            attempt=1,
            cause=cause,
            next="stop",
            first_step=first,
            last_step=last,
            durable_step=durable,
            time=60.0 * minute,
            **facts,
        ),
    )


TIMEOUT_5 = ended("timeout", 5)
PREEMPTED_5 = ended("preempted", 5)
CRASH_5 = ended("crashed", 5, 7)


def from_memory(first: int, durable: int = 0) -> Attempt:
    """An attempt that began with a snapshot in memory."""
    return ended("killed", first, first + 3, durable)


DECISIONS: list[tuple[str, Sequence[Attempt], bool]] = [
    # What ends an attempt, once
    ("preempted", [ended("preempted", 0, 5)], True),
    ("a stop that nobody explains", [ended("unknown", 0, 5)], True),
    ("out of time", [ended("timeout", 0, 5)], True),
    ("a node died", [ended("node_failure", 0, 5)], True),
    ("crashed", [ended("crashed", 0, 5)], True),
    ("killed", [ended("killed", 0, 5)], True),
    ("out of memory", [ended("out_of_memory", 0, 5)], True),
    ("hung", [ended("hang", 0, 5)], True),
    # Snapshots in memory
    ("deaths, each with a newer snapshot", [ended("killed", 0, 20), *map(from_memory, range(20, 90, 10))], True),
    ("three deaths, after which the snapshot is the same", [ended("killed", 0, 20), *[from_memory(20)] * 4], False),
    ("two deaths, after which it is the same", [ended("killed", 0, 20), *[from_memory(20)] * 2], True),
    (
        "deaths at one step, each with a snapshot one step newer",
        [ended("killed", 0, 60), *[ended("killed", first, 60, 0) for first in range(50, 53)]],
        False,
    ),
    ("a snapshot that was lost later", [from_memory(20), ended("killed", 0), ended("killed", 0)], False),
    ("a checkpoint newer than the snapshot", [*[from_memory(20)] * 2, from_memory(20, 30), from_memory(30)], True),
    # Time limits
    ("out of time a hundred times, each a step further", [ended("timeout", n, n + 1) for n in range(100)], True),
    ("out of time without a step, twice", [TIMEOUT_5] * 2, True),
    ("out of time without a step, once too often", [TIMEOUT_5] * 3, False),
    ("out of time before the loop, once too often", [ended("timeout", None)] * 3, False),
    ("a preemption between does not help", [TIMEOUT_5, TIMEOUT_5, PREEMPTED_5, TIMEOUT_5], False),
    ("a preemption that got further does", [TIMEOUT_5, TIMEOUT_5, ended("preempted", 5, 6), ended("timeout", 6)], True),
    ("a step between starts the count anew", [TIMEOUT_5, TIMEOUT_5, ended("timeout", 5, 6), ended("timeout", 6)], True),
    ("steps long ago do not help", [ended("timeout", 0, 5), *[TIMEOUT_5] * 3], False),
    ("a step that no checkpoint holds is none", [ended("timeout", 5, 6, durable=5)] * 3, False),
    # Preemptions, and what nobody explains
    ("preempted, for the hundredth time and with nothing done", [ended("preempted", 0)] * 100, True),
    ("unexplained for the hundredth time", [ended("unknown", 0)] * 100, True),
    # Nodes
    ("nodes died nine times without progress", [ended("node_failure", 5)] * 9, True),
    ("nodes died ten times without progress", [ended("node_failure", 5)] * 10, False),
    ("twenty times, each a checkpoint further", [ended("node_failure", n, n, n + 1) for n in range(20)], True),
    # Crashes
    ("crashed twice", [CRASH_5] * 2, True),
    ("crashed thrice", [CRASH_5] * 3, False),
    ("crashed, killed and hung", [CRASH_5, ended("killed", 5), ended("hang", 5)], False),
    ("crashed twice, and then out of time", [CRASH_5, CRASH_5, TIMEOUT_5], True),
    ("crashed and timed out in turn, neither thrice", [CRASH_5, TIMEOUT_5] * 2, True),
    ("crashed and timed out in turn, the one thrice", [CRASH_5, TIMEOUT_5, CRASH_5, TIMEOUT_5, CRASH_5], False),
    ("crashed and preempted in turn, without progress", [CRASH_5, PREEMPTED_5] * 2 + [CRASH_5], False),
    ("crashed and preempted in turn, the preemption last", [CRASH_5, PREEMPTED_5] * 3, True),
    ("crashed thrice, and left a newer checkpoint", [CRASH_5, CRASH_5, ended("crashed", 5, 9, durable=8)], True),
    ("crashed thrice since", [ended("crashed", 0, 9, durable=5), *[CRASH_5] * 3], False),
    ("an older checkpoint again", [ended("crashed", 0, 9, durable=8), *[ended("crashed", 4, 8, 8)] * 3], False),
    ("crashed before the loop, with a checkpoint there", [ended("crashed", None, None, durable=50)] * 3, False),
    ("crashed before the loop, twice, likewise", [ended("crashed", None, None, durable=50)] * 2, True),
    # One step that fails again and again
    ("one step failed twice", [ended("crashed", n, 9, n + 1, step=9) for n in range(2)], True),
    (
        "one step failed thrice, from newer checkpoints",
        [ended("crashed", n, 9, n + 1, step=9) for n in range(3)],
        False,
    ),
    ("other steps failed", [ended("crashed", n, n + 1, n + 1, step=n) for n in range(9)], True),
    ("one step thrice, others between", [ended("crashed", n, 9, n + 1, step=9 - n % 2) for n in range(5)], False),
    (
        "one step failed thrice, for memory the last time",
        [*[ended("crashed", n, 9, n + 1, step=9) for n in range(2)], ended("out_of_memory", 2, 9, 3, step=9)],
        False,
    ),
    ("kills that know of no step", [ended("killed", n, 9, n + 1, rank=1) for n in range(9)], True),
    # An exception on every node
    ("everywhere, before the first step", [ended("crashed", None, everywhere=True)], False),
    ("everywhere, in the first step", [ended("crashed", 0, 0, step=0, everywhere=True)], False),
    ("everywhere, later", [ended("crashed", 0, 1, step=1, everywhere=True)], True),
    ("on one node alone, before the first step", [ended("crashed", None, everywhere=False)], True),
    ("everywhere, but it has worked", [ended("preempted", 0, 5), ended("crashed", None, everywhere=True)], True),
    ("everywhere, and a preemption before", [ended("preempted", None), ended("crashed", None, everywhere=True)], False),
    ("what would fail again, after progress", [ended("crashed", 0, 9, 5, final=True)], False),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_a_run_goes_on_until_its_budgets_are_spent(attempts: Sequence[Attempt], again: bool) -> None:
    decision = decide(attempts, RetryConfig(), QUEUE)
    assert decision.action == ("requeue" if again else "fail")
    assert decision.reason and "\n" not in decision.reason


@pytest.mark.parametrize("cause", ["finished", "cancelled", "stopped", "disk"])
@pytest.mark.parametrize("requeue", ["requeue", "successor", "none"])
def test_a_person_decides_after_an_end_that_no_retry_mends(cause: Cause, requeue: Any) -> None:
    room = Room(requeue=requeue, in_place=lambda without: True)
    assert decide([ended(cause, 0, 5)], RetryConfig(preemption=UNLIMITED), room).action == "stop"


def test_every_cause_is_known_to_the_policy() -> None:
    assert set(BUDGETS) | {"finished", "cancelled", "stopped", "disk"} == set(get_args(Cause))
    assert set(BUDGETS.values()) == set(RetryConfig.__dataclass_fields__)
    assert set(BUDGETS) >= STAYS and LOOKS_LIKE_NODE <= STAYS


BUDGET_ROWS: list[tuple[str, RetryConfig, Sequence[Attempt], bool]] = [
    ("no preemption allowed", RetryConfig(preemption=0), [ended("preempted", 0, 5)], False),
    ("no time limit allowed", RetryConfig(time_limit=0), [ended("timeout", 0, 5)], False),
    ("no dead node allowed", RetryConfig(node_failure=0), [ended("node_failure", 0, 5, 5)], False),
    ("no crash allowed", RetryConfig(crash=0), [ended("crashed", 0, 5, 5)], False),
    ("no crash allowed, and none came last", RetryConfig(crash=0), [CRASH_5, PREEMPTED_5], True),
    ("one, with progress", RetryConfig(crash=1), [ended("crashed", 0, 9, 5)], True),
    ("one, without progress", RetryConfig(crash=1), [CRASH_5], False),
    ("one, with progress, in a known step", RetryConfig(crash=1), [ended("crashed", 0, 9, 5, step=9)], False),
    ("two preemptions allowed, one", RetryConfig(preemption=2), [PREEMPTED_5], True),
    ("two preemptions allowed, two", RetryConfig(preemption=2), [PREEMPTED_5, ended("unknown", 5)], False),
    ("unlimited crashes in one step", RetryConfig(crash=UNLIMITED), [ended("crashed", 5, 9, step=9)] * 100, True),
    ("but everywhere and at once", RetryConfig(crash=UNLIMITED), [ended("crashed", None, everywhere=True)], False),
    ("unlimited time limits", RetryConfig(time_limit=UNLIMITED), [TIMEOUT_5] * 100, True),
    ("unlimited dead nodes", RetryConfig(node_failure=UNLIMITED), [ended("node_failure", 5)] * 100, True),
]


@pytest.mark.parametrize(
    ("retry", "attempts", "again"), [row[1:] for row in BUDGET_ROWS], ids=[row[0] for row in BUDGET_ROWS]
)
def test_a_budget_is_what_the_yaml_says(retry: RetryConfig, attempts: Sequence[Attempt], again: bool) -> None:
    assert (decide(attempts, retry, QUEUE).action == "requeue") == again


# A command that reports nothing

QUIET_TIMEOUT, QUIET_CRASH = ended("timeout", None), ended("crashed", None)

SILENT: list[tuple[str, Sequence[Attempt], bool]] = [
    ("out of time for the hundredth time", [QUIET_TIMEOUT] * 100, True),
    ("three crashes in a row", [QUIET_CRASH] * 3, False),
    ("three crashes, a time limit between", [QUIET_CRASH, QUIET_CRASH, QUIET_TIMEOUT, QUIET_CRASH], True),
    ("three crashes since a preemption", [ended("preempted", None), *[QUIET_CRASH] * 3], False),
    ("ten dead nodes in a row", [ended("node_failure", None)] * 10, False),
    ("a program that reported its steps once", [ended("timeout", 5), *[QUIET_TIMEOUT] * 2], False),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in SILENT], ids=[row[0] for row in SILENT])
def test_a_command_that_reports_nothing_is_not_judged_by_its_silence(attempts: Sequence[Attempt], again: bool) -> None:
    assert decide(attempts, RetryConfig(), QUEUE, command=True).action == ("requeue" if again else "fail")


def test_a_command_that_reports_nothing_may_be_forbidden_to_run_out_of_time() -> None:
    assert decide([QUIET_TIMEOUT], RetryConfig(time_limit=0), QUEUE, command=True).action == "fail"


# Where it goes on


def after(*attempts: Attempt, enough: bool = True, **room: Any) -> Decision:
    """The decision in a job that runs on, and has nodes enough or not."""
    return decide(attempts, RetryConfig(), Room(**{"in_place": lambda without: enough, "requeue": "requeue", **room}))


def test_a_death_starts_again_in_place_and_a_job_that_makes_room_goes_back_to_the_queue() -> None:
    rows = {cause: after(ended(cause, 0, 5)).action for cause in BUDGETS}
    assert rows == {cause: "in_place" if cause in STAYS else "requeue" for cause in BUDGETS}
    assert {after(ended(cause, 0, 5), enough=False).action for cause in BUDGETS} == {"requeue"}
    assert {after(ended(cause, 0, 5), enough=False, requeue="successor").action for cause in BUDGETS} == {"successor"}


def test_on_this_machine_everything_goes_on_in_place() -> None:
    assert {after(ended(cause, 0, 5, nodes=()), requeue="none").action for cause in BUDGETS} == {"in_place"}
    assert after(ended("killed", 0, 5), requeue="none", enough=False).action == "stop"


def test_restarts_without_progress_wait_longer_and_longer_and_progress_begins_anew() -> None:
    waits = [pause([ended("unknown", 5)] * count) for count in range(1, 10)]
    assert waits == [*PAUSES, 60, 60, 60]
    assert pause([*[ended("killed", 5)] * 2, ended("killed", 5, 9, durable=8)]) == 0


# Nodes that are given up


def died_on(*deaths: tuple[str, float], cause: Cause = "killed", progress: bool = True, **facts: Any) -> list[Attempt]:
    """Attempts that ended for what happened on one node, (node, minute), one after the other."""
    return [
        ended(cause, 10 * n * progress, 10 * n + 9, 10 * (n + 1) * progress, node=node, minute=minute, **facts)
        for n, (node, minute) in enumerate(deaths)
    ]


TWICE = (("node2", 0), ("node2", 10))

GIVEN_UP: list[tuple[str, Sequence[Attempt], set[str], set[str]]] = [
    ("once is chance", died_on(("node2", 0), progress=False), set(), set()),
    ("twice without progress", died_on(*TWICE, progress=False), set(), {"node2"}),
    ("twice with progress in between", died_on(*TWICE), set(), set()),
    ("twice, an hour apart", died_on(("node2", 0), ("node2", 61), progress=False), set(), set()),
    ("thrice within an hour", died_on(("node2", 0), ("node2", 20), ("node2", 59)), set(), {"node2"}),
    ("thrice within two hours", died_on(("node2", 0), ("node2", 50), ("node2", 100)), set(), set()),
    (
        "another node between",
        died_on(("node2", 0), ("node1", 5), ("node2", 9), cause="node_failure", progress=False),
        set(),
        {"node2"},
    ),
    ("each node once", died_on(("node1", 0), ("node2", 1), progress=False), set(), set()),
    ("given up before", died_on(*TWICE, progress=False), {"node2"}, set()),
    (
        "by several causes",
        [*died_on(("node2", 0), progress=False), *died_on(("node2", 1), cause="node_failure", progress=False)],
        set(),
        {"node2"},
    ),
    (
        "twice with a snapshot in memory in between",
        [
            ended("killed", 0, 30, 0),
            ended("killed", 28, 60, 0, node="node2"),
            ended("killed", 58, 90, 0, node="node2", snapshot_step=88),
        ],
        set(),
        set(),
    ),
    (
        "twice, the second time with a snapshot after a checkpoint",
        [
            ended("killed", 146, 220, 200, node="node1"),
            ended("killed", 200, 256, 200, node="node1", snapshot_step=240),
        ],
        set(),
        set(),
    ),
    (
        "twice, the second time with a snapshot that is no newer",
        [
            ended("killed", 146, 220, 200, node="node1"),
            ended("killed", 200, 256, 200, node="node1", snapshot_step=200),
        ],
        set(),
        {"node1"},
    ),
    ("an exception", died_on(*TWICE, cause="crashed", progress=False), set(), set()),
    ("the same error on all nodes", died_on(*TWICE, progress=False, everywhere=True), set(), set()),
    ("nobody knows where", died_on((None, 0), (None, 1), progress=False), set(), set()),  # type: ignore[arg-type]
    ("this machine, which has no nodes", died_on(("local", 0), ("local", 1), progress=False, nodes=()), set(), set()),
]


@pytest.mark.parametrize(
    ("attempts", "excluded", "given_up"), [row[1:] for row in GIVEN_UP], ids=[row[0] for row in GIVEN_UP]
)
def test_a_node_is_given_up_only_after_deaths_without_progress_or_three_in_an_hour(
    attempts: Sequence[Attempt], excluded: set[str], given_up: set[str]
) -> None:
    decision = decide(attempts, RetryConfig(), QUEUE, excluded=excluded)
    assert set(decision.exclude) == given_up
    assert decision.action == "requeue"


@pytest.mark.parametrize(
    ("cause", "given_up"), [(cause, cause in LOOKS_LIKE_NODE) for cause in BUDGETS if cause in STAYS]
)
def test_a_spare_takes_the_place_after_a_death_that_looks_like_the_nodes(cause: Cause, given_up: bool) -> None:
    decision = after(ended(cause, 0, 5, node="node2"), spares=1)
    assert (decision.action, list(decision.exclude)) == ("in_place", ["node2"] if given_up else [])
    assert not after(ended(cause, 0, 5, node="node2")).exclude


def test_a_bad_node_is_left_out_in_the_job_rather_than_in_the_next_one() -> None:
    asked: list[frozenset[str]] = []
    deaths = died_on(*TWICE, progress=False)
    assert after(*deaths).action == "in_place"
    decision = after(*deaths, in_place=lambda without: bool(asked.append(without)))
    assert (decision.action, set(decision.exclude), asked[0]) == ("requeue", {"node2"}, {"node2"})


def test_a_bad_node_that_nothing_could_replace_is_kept() -> None:
    deaths = died_on(*TWICE, progress=False)
    nowhere = {"in_place": lambda without: not without, "elsewhere": lambda without: False}
    assert (after(*deaths, **nowhere).action, after(*deaths, **nowhere).exclude) == ("in_place", {})


def test_an_excluded_node_is_not_gone_back_to_while_the_job_could_have_another_one() -> None:
    lost = ended("node_failure", 0, 5, node="node1")
    for elsewhere, action in ((True, "requeue"), (False, "in_place")):
        room = Room(
            requeue="requeue",
            in_place=lambda without: not without,  # with the excluded one there are enough
            elsewhere=lambda without, answer=elsewhere: answer,  # type: ignore[misc]
        )
        assert decide([lost], RetryConfig(), room, excluded=["node2"]).action == action


@pytest.mark.parametrize("cause", ["timeout", "preempted", "node_failure"])
def test_a_scheduler_that_is_ending_the_job_is_not_asked_what_changes_nothing(cause: Cause) -> None:
    def ask(without: frozenset[str]) -> bool:
        raise AssertionError("asked")

    room = Room(requeue="requeue", elsewhere=ask)
    assert decide([ended(cause, 0, 5)], RetryConfig(), room, excluded=["node2"]).action == "requeue"


def test_a_run_that_fails_gives_up_no_node() -> None:
    decision = decide(died_on(*TWICE, ("node2", 11), progress=False), RetryConfig(), QUEUE)
    assert (decision.action, decision.exclude) == ("fail", {})


# Large jobs

MANY = [f"node{number}" for number in range(MANY_NODES)]


def crashed_on(node: str, rank: int | None, **facts: Any) -> Attempt:
    return ended("crashed", None, nodes=MANY, node=node, rank=rank, **facts)


BROKEN = [
    ("another node's GPU, after one that is excluded", [("a", 0), ("a", 0), ("b", 8)], "a", True),
    ("two of another one's", [("a", 0), ("a", 0), ("b", 8), ("b", 8)], "ab", True),
    ("an error that follows its rank to another node", [("a", 0), ("a", 0), ("b", 0)], "a", False),
    ("an error of a rank that nobody knows", [("a", None), ("a", None), ("b", None)], "a", False),
    ("a node that is not excluded", [("a", 0), ("a", 0), ("a", 0)], "", False),
    ("five nodes", [(node, rank) for rank, node in enumerate("abcde") for _ in "12"], "abcde", False),
]


@pytest.mark.parametrize(
    ("crashes", "excluded", "goes_on"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_crashes_on_nodes_that_are_excluded_since_count_as_failures_of_nodes(
    crashes: Sequence[tuple[str, int | None]], excluded: str, goes_on: bool
) -> None:
    decision = decide([crashed_on(*crash) for crash in crashes], RetryConfig(), QUEUE, excluded=excluded)
    assert (decision.action != "fail") is goes_on


def until_it_fails(crashes: Iterable[tuple[str, int]], cause: Cause = "crashed", nodes: Sequence[str] = MANY) -> int:
    """How many nodes were excluded when crashes without progress, on (node, rank), have come to an end."""
    attempts: list[Attempt] = []
    excluded: list[str] = []
    for node, rank in crashes:
        attempts.append(ended(cause, 5, nodes=[*nodes, node], node=node, rank=rank))
        decision = decide(attempts, RetryConfig(), QUEUE, excluded=excluded)
        if decision.action == "fail":
            return len(excluded)
        excluded += decision.exclude
    raise AssertionError(f"goes on after {len(attempts)} attempts")


WANDERING = [(f"broken{number // 2}", number) for number in range(100)]


def test_crashes_that_wander_over_the_nodes_of_a_large_job_end_with_the_nodes_budget() -> None:
    assert 2 * until_it_fails(WANDERING) == RetryConfig().node_failure
    assert until_it_fails(WANDERING, nodes=["a"]) == 0, "where a small job crashes says nothing about its nodes"
    assert until_it_fails(WANDERING, "out_of_memory") == 1, "memory that is too small is the run's fault on every node"


def test_what_fails_on_every_node_alike_is_not_the_fault_of_an_excluded_one() -> None:
    assert decide([crashed_on("a", 0, everywhere=True)] * 3, RetryConfig(), QUEUE, excluded=["a"]).action == "fail"
