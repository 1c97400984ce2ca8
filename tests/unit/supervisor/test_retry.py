"""What comes after an attempt: the policy, by tables of single decisions. Whole runs: test_weather.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from jobkit.config.schema import UNLIMITED, RetryConfig
from jobkit.run.records import AttemptBegan, AttemptEnded, Cause
from jobkit.run.status import Attempt
from jobkit.supervisor.retry import BUDGETS, PAUSES, Decision, RestartOptions, decide
from jobkit.supervisor.tries import DEATHS, STAYS

GRACEFUL = ("preempted", "timeout", "unknown", "stopped", "cancelled", "finished")
"""Ends at which a checkpoint of the last step is written."""

QUEUE = RestartOptions(requeue="requeue")
"""A job that gives its nodes back."""


def ended(
    cause: Cause,
    first: int | None = 0,
    last: int | None = None,
    durable: int | None = None,
    *,
    nodes: Sequence[str] = ("node1", "node2"),
    minute: float = 0.0,
    submission: int = 1,
    how: Any = "in place",
    **facts: Any,
) -> Attempt:
    """An attempt from step `first` (None: it never came to its loop) to step `last`, without a start, of a minute.

    `durable`, the newest checkpoint when it ended, is the last step of an attempt that ended gracefully, else the step
    where it began.
    """
    last = first if last is None else last
    if durable is None:
        durable = (last if cause in GRACEFUL else first) or 0
    began = 60.0 * (minute - 1)
    return Attempt(
        number=1,
        submission=submission,
        began=AttemptBegan(attempt=1, token="t", job_id="7", nodes=list(nodes), time=began, how=how),
        ended=AttemptEnded(
            attempt=1,
            cause=cause,
            next="stop",
            first_step=first,
            last_step=last,
            durable_step=durable,
            time=60.0 * minute,
            loop_began=None if first is None else began,
            **facts,
        ),
    )


def numbered(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The same, one after the other; with `minute` in order where the rows gave none."""
    return [replace(attempt, number=number) for number, attempt in enumerate(attempts, 1)]


def decision_after(attempts: Sequence[Attempt], retry: RetryConfig, room: RestartOptions, **options: Any) -> Decision:
    return decide(numbered(attempts), retry, room, **options)


TIMEOUT_5 = ended("timeout", 5)
PREEMPTED_5 = ended("preempted", 5)
BUG_5 = ended("crashed", 5, 7, nature="program")
LINE = "OSError at data.py:7"


def from_memory(first: int) -> Attempt:
    """An attempt that began with a snapshot in memory, and died of what only a programmer mends."""
    return further(first, first + 3, 0)


def further(first: int, last: int, durable: int) -> Attempt:
    return ended("crashed", first, last, durable, nature="program")


def at(step: int, first: int, **facts: Any) -> Attempt:
    """A death in a known step of an attempt that began at `first`."""
    return ended(**{"cause": "crashed", "first": first, "last": step, "step": step, "signature": LINE, **facts})


def without_ranks(cause: Cause) -> Attempt:
    """An attempt that started no rank: the reason to stop came before."""
    return replace(ended(cause, None), began=AttemptBegan(attempt=1, token="t", job_id="7", ranks=0))


AT_START = ended("crashed", None, everywhere=True, signature=LINE)
RANK_0 = {"signature": LINE, "rank": 0, "alone": True}

DECISIONS: list[tuple[str, Sequence[Attempt], bool]] = [
    # What ends an attempt, once
    *((f"{cause}, once", [ended(cause, 0, 5)], True) for cause in BUDGETS),
    # Program: a type of error that a programmer mends
    ("a bug twice", [BUG_5] * 2, True),
    ("a bug thrice", [BUG_5] * 3, False),
    ("what may be weather, thrice", [ended("crashed", 5, 7)] * 3, True),
    ("a bug twice, and then out of time", [BUG_5, BUG_5, TIMEOUT_5], True),
    ("a bug and a time limit in turn, the one thrice", [BUG_5, TIMEOUT_5, BUG_5, TIMEOUT_5, BUG_5], False),
    ("a bug and a preemption in turn, without progress", [BUG_5, PREEMPTED_5] * 2 + [BUG_5], False),
    ("a bug thrice, and a newer checkpoint", [BUG_5, BUG_5, ended("crashed", 5, 9, 8, nature="program")], True),
    ("a bug thrice since", [ended("crashed", 0, 9, durable=5), *[BUG_5] * 3], False),
    ("a bug before the loop, with a checkpoint there", [ended("crashed", None, None, 50, nature="program")] * 3, False),
    ("three bugs, each with a newer snapshot", [from_memory(first) for first in range(20, 90, 10)], True),
    ("three bugs, each a step further", [further(first, first + 10, 0) for first in range(3)], False),
    ("three of the weather, each a step further", [ended("crashed", first, first + 10) for first in range(3)], True),
    ("three bugs, each further by half of its steps", [further(first, first + 10, 0) for first in (0, 5, 10)], True),
    ("three bugs, after which the snapshot is the same", [ended("killed", 0, 20), *[from_memory(20)] * 3], False),
    ("a checkpoint newer than the snapshot", [*[from_memory(20)] * 2, further(20, 33, 30), from_memory(30)], True),
    # Proof: restarts are exact
    ("the same in one step twice", [at(9, 5), at(9, 7)], False),
    ("with an attempt between", [at(9, 5), ended("killed", 5, 8), at(9, 7)], False),
    ("in other steps", [at(9, 5), at(10, 7)], True),
    ("elsewhere in that step", [at(9, 5), at(9, 7, signature="OSError at data.py:8")], True),
    ("directly after the restore", [at(9, 5), at(9, 9)], True),
    ("directly after it, and once more from an older state", [at(9, 5), at(9, 9), at(9, 5)], False),
    ("of the outside", [at(9, 5, nature="outside"), at(9, 7, nature="outside")], True),
    ("of a device", [at(9, 5, nature="hardware"), at(9, 7, nature="hardware")], True),
    ("an abort, which a watchdog sends to all", [at(9, 5, signature=None), at(9, 7, signature=None)], True),
    ("too little memory", [at(9, 5, cause="out_of_memory", nature="program")] * 2, True),
    ("too little memory, thrice", [at(9, 5, cause="out_of_memory", nature="program")] * 3, False),
    ("a hang in one step", [at(9, 5, signature="hang"), at(9, 7, signature="hang")], False),
    ("before a person submitted it again", [replace(at(9, 5), submission=0), at(9, 7)], True),
    # Before the first step
    ("everywhere, once", [AT_START], True),
    ("everywhere, twice", [AT_START] * 2, False),
    ("everywhere, in the first step", [at(0, 0, everywhere=True)] * 2, False),
    ("everywhere, but it has worked", [ended("preempted", 0, 5), *[AT_START] * 2], True),
    ("everywhere, but it worked in a submission before", [ended("killed", 0, 5, submission=0), *[AT_START] * 2], True),
    ("everywhere, and a preemption between", [AT_START, ended("preempted", None), AT_START], False),
    ("everywhere, of the outside", [ended("crashed", None, everywhere=True, nature="outside")] * 2, True),
    ("everywhere, of the device", [ended("crashed", None, everywhere=True, nature="hardware")] * 2, True),
    ("on one node", [ended("crashed", None, node="node1", **RANK_0)] * 2, True),
    (
        "by one rank on two nodes",
        [ended("crashed", None, node=node, **RANK_0) for node in ("node1", "node2")],
        False,
    ),
    ("what would fail again, after progress", [ended("crashed", 0, 9, 5, final=True)], False),
    # Time limits
    ("out of time a hundred times, each a step further", [ended("timeout", n, n + 1) for n in range(100)], True),
    ("out of time without a step, twice", [TIMEOUT_5] * 2, True),
    ("out of time without a step, once too often", [TIMEOUT_5] * 3, False),
    ("out of time before the loop, once too often", [ended("timeout", None)] * 3, False),
    ("out of time in a pause, thrice", [ended("killed", 0, 5, next_at=300.0), without_ranks("timeout")] * 3, True),
    ("out of time before its agents came, thrice", [ended("killed", 0, 5), *[without_ranks("timeout")] * 3], False),
    ("a preemption between does not help", [TIMEOUT_5, TIMEOUT_5, PREEMPTED_5, TIMEOUT_5], False),
    ("a preemption that got further does", [TIMEOUT_5, TIMEOUT_5, ended("preempted", 5, 6), ended("timeout", 6)], True),
    ("a step between starts the count anew", [TIMEOUT_5, TIMEOUT_5, ended("timeout", 5, 6), ended("timeout", 6)], True),
    ("steps long ago do not help", [ended("timeout", 0, 5), *[TIMEOUT_5] * 3], False),
    ("a step that no checkpoint holds is none", [ended("timeout", 5, 6, durable=5)] * 3, False),
    # Preemptions, and what nobody explains
    ("preempted, for the hundredth time and with nothing done", [ended("preempted", 0)] * 100, True),
    ("unexplained for the hundredth time", [ended("unknown", 0)] * 100, True),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_a_run_fails_only_where_a_person_must_act(attempts: Sequence[Attempt], again: bool) -> None:
    decision = decision_after(attempts, RetryConfig(), QUEUE)
    assert decision.action == ("requeue" if again else "fail")
    assert decision.reason and "\n" not in decision.reason


@pytest.mark.parametrize("cause", ["finished", "cancelled", "stopped", "disk"])
@pytest.mark.parametrize("requeue", ["requeue", "successor", "none"])
def test_a_person_decides_after_an_end_that_no_retry_mends(cause: Cause, requeue: Any) -> None:
    room = RestartOptions(requeue=requeue, in_place=lambda without: True)
    assert decide([ended(cause, 0, 5)], RetryConfig(preemption=UNLIMITED), room).action == "stop"


def test_a_setup_line_that_fails_is_tried_on_one_other_node() -> None:
    """Where there is one; a newer state in between gives it another try."""

    def failed(node: str | None) -> Attempt:
        return ended("setup", None, nodes=(), node=node, error="module load x (exit code 1)")

    first = decide([failed("node1")], RetryConfig(), RestartOptions(requeue="requeue"))
    assert (first.action, list(first.avoid)) == ("requeue", ["node1"])
    assert first.reason == "setup: module load x (exit code 1); one more try without node1"
    trained = [failed("node1"), ended("preempted", 0, 5, how="requeue"), failed("node2")]
    assert decide(trained, RetryConfig(), RestartOptions(requeue="successor")).action == "successor"
    for attempts, room in (
        ([failed("node1"), failed("node2")], RestartOptions(requeue="requeue")),
        ([failed("node1")], RestartOptions(requeue="requeue", elsewhere=lambda without: "node1" not in without)),
        ([failed(None)], RestartOptions(requeue="none", in_place=lambda without: True)),
    ):
        assert decide(attempts, RetryConfig(), room).action == "fail"


def test_every_cause_is_known_to_the_policy() -> None:
    assert set(BUDGETS) | {"finished", "cancelled", "stopped", "setup", "disk"} == set(get_args(Cause))
    assert {*BUDGETS.values(), "patience"} == set(RetryConfig.__dataclass_fields__)
    assert set(BUDGETS) >= STAYS > DEATHS


def test_after_two_deaths_at_the_newest_state_one_try_begins_with_an_older_one() -> None:
    """A checkpoint is written before a validation that has a typo."""
    again = [at(9, 5), at(9, 9)]
    assert decision_after(again, RetryConfig(), HERE).before_step == 9
    for others in ([at(9, 5)], [at(9, 5), at(8, 8)], [at(9, 5), at(9, 9, nature="outside")]):
        assert decision_after(others, RetryConfig(), HERE).before_step is None
    went = [again[0], replace(again[1], ended=replace(again[1].ended, before_step=9)), at(4, 4), at(9, 9)]  # type: ignore[type-var]
    assert decision_after(went, RetryConfig(), HERE).before_step is None, "once until there is progress"


BUDGET_ROWS: list[tuple[str, RetryConfig, Sequence[Attempt], bool]] = [
    ("no preemption allowed", RetryConfig(preemption=0), [ended("preempted", 0, 5)], False),
    ("no time limit allowed", RetryConfig(time_limit=0), [ended("timeout", 0, 5)], False),
    ("no dead node allowed", RetryConfig(node_failure=0), [ended("node_failure", 0, 5, 5)], False),
    ("no crash allowed", RetryConfig(crash=0), [ended("killed", 0, 5, 5)], False),
    ("no crash allowed, and none came last", RetryConfig(crash=0), [BUG_5, PREEMPTED_5], True),
    ("one, with progress", RetryConfig(crash=1), [ended("crashed", 0, 9, 5, nature="program")], True),
    ("one, without progress", RetryConfig(crash=1), [BUG_5], False),
    ("two preemptions allowed, one", RetryConfig(preemption=2), [PREEMPTED_5], True),
    ("two preemptions allowed, two", RetryConfig(preemption=2), [PREEMPTED_5, ended("unknown", 5)], False),
    ("unlimited bugs in one step", RetryConfig(crash=UNLIMITED), [at(9, 5, nature="program")] * 100, True),
    ("but everywhere and at once", RetryConfig(crash=UNLIMITED), [AT_START] * 2, False),
    ("unlimited time limits", RetryConfig(time_limit=UNLIMITED), [TIMEOUT_5] * 100, True),
]


@pytest.mark.parametrize(
    ("retry", "attempts", "again"), [row[1:] for row in BUDGET_ROWS], ids=[row[0] for row in BUDGET_ROWS]
)
def test_a_budget_is_what_the_yaml_says(retry: RetryConfig, attempts: Sequence[Attempt], again: bool) -> None:
    retry = replace(retry, patience=UNLIMITED)
    assert (decision_after(attempts, retry, QUEUE).action == "requeue") == again


# Patience


def minutes(*ends: float, cause: Cause = "crashed", **facts: Any) -> list[Attempt]:
    """Deaths in place without progress, each of an attempt of a minute that ended so many minutes after noon."""
    facts = {"next_at": 1e9, **facts}  # all of the time between was a pause
    return [ended(cause, 5, 6, minute=minute, nodes=(), **facts) for minute in ends]


HERE = RestartOptions(in_place=lambda without: True)
PATIENCE = [
    ("59 minutes", RetryConfig(), minutes(0, 1, 2, 59), "in_place"),
    ("an hour", RetryConfig(), minutes(0, 1, 2, 60), "stop"),
    ("an hour with three tries", RetryConfig(), minutes(0, 1, 60), "in_place"),
    ("what the YAML says", RetryConfig(patience="10min"), minutes(0, 1, 2, 10), "stop"),
    ("unlimited", RetryConfig(patience=UNLIMITED), minutes(0, 1, 2, 6000), "in_place"),
    ("nodes, by time and count", RetryConfig(), minutes(*range(9), 60, cause="node_failure"), "stop"),
    ("nodes, by time and not by count", RetryConfig(), minutes(*range(8), 60, cause="node_failure"), "in_place"),
    ("nodes, by count and not by time", RetryConfig(), minutes(*range(20), cause="node_failure"), "in_place"),
    (
        "dead nodes without limit",
        RetryConfig(node_failure=UNLIMITED),
        minutes(*range(100), cause="node_failure"),
        "in_place",
    ),
]


@pytest.mark.parametrize(
    ("retry", "attempts", "action"), [row[1:] for row in PATIENCE], ids=[row[0] for row in PATIENCE]
)
def test_patience_is_an_hour_of_waiting_and_four_tries(
    retry: RetryConfig, attempts: Sequence[Attempt], action: str
) -> None:
    decision = decision_after(attempts, retry, HERE)
    assert (decision.action, decision.gave_up) == (action, action == "stop")


def test_after_patience_the_words_say_how_long_it_waited_and_a_submission_has_one_try_until_progress() -> None:
    ends = minutes(0, 1, 2, 60, error="rank 0: S3 is away")
    words = decision_after(ends, RetryConfig(), HERE).reason
    assert words == "gave up after 1:00:00 (4 tries): crashed: rank 0: S3 is away"
    gave_up = [*ends[:-1], replace(ends[-1], ended=replace(ends[-1].ended, gave_up=True, waited=3600.0))]  # type: ignore[type-var]
    again = ended("crashed", 5, 6, minute=100, submission=2)
    assert decision_after([*gave_up, again], RetryConfig(), HERE).gave_up
    further = ended("crashed", 5, 9, 8, minute=100, submission=2)
    assert decision_after([*gave_up, further], RetryConfig(), HERE).action == "in_place"


def test_a_long_life_and_the_queue_count_little() -> None:
    one, other = ended("crashed", 5, 6, minute=0), ended("crashed", 5, 6, minute=600)
    long = replace(other, began=replace(other.began, time=1.0), ended=replace(other.ended, loop_began=2.0))  # type: ignore[type-var]
    assert decision_after([one, long], RetryConfig(), HERE).patience == 3600 - 2 - 300
    slept = replace(other, began=replace(other.began, how="in place"))
    assert decision_after([one, slept], RetryConfig(), HERE).patience == 3600 - 300 - 60, "of a clock, or a machine"
    queued = replace(other, began=replace(other.began, how="requeue"))
    assert decision_after([one, queued], RetryConfig(), HERE).patience == 3600 - 60


def test_pauses_grow_with_the_tries_and_progress_begins_anew() -> None:
    waits = [decision_after([ended("unknown", 5)] * count, RetryConfig(), HERE).pause for count in range(1, 10)]
    assert [round(wait / waits[1] * PAUSES[1], 3) for wait in waits] == [*PAUSES, PAUSES[-1]]
    assert PAUSES[1] <= waits[1] <= 1.2 * PAUSES[1], "spread by a hash of the run"
    assert decision_after([*minutes(0, 1), ended("killed", 5, 9, 8, minute=2)], RetryConfig(), HERE).pause == 0
    short = decision_after([ended("unknown", 5)] * 9, RetryConfig(patience="1min"), HERE).pause
    assert short == waits[-1] / 60


def test_a_job_that_has_waited_for_ten_minutes_gives_its_nodes_back_once_its_state_is_on_the_disk() -> None:
    def decided(room: RestartOptions, **facts: Any) -> tuple[str, bool]:
        deaths = [*minutes(*range(0, 24, 3)), *minutes(24, **facts)]
        decision = decision_after(deaths, RetryConfig(), room)
        return decision.action, decision.pause > 0

    queue = replace(HERE, requeue="requeue")
    assert decided(queue) == ("requeue", True)
    assert decided(queue, snapshot_step=6) == ("in_place", True), "the agents' memory alone has it"
    assert decided(HERE) == ("in_place", True), "this machine has no queue"


# A command that reports nothing

QUIET_TIMEOUT, QUIET_CRASH = ended("timeout", None), ended("crashed", None)

SILENT: list[tuple[str, Sequence[Attempt], bool]] = [
    ("out of time for the hundredth time", [QUIET_TIMEOUT] * 100, True),
    ("three crashes in a row", [QUIET_CRASH] * 3, False),
    ("three crashes, a time limit between", [QUIET_CRASH, QUIET_CRASH, QUIET_TIMEOUT, QUIET_CRASH], True),
    (
        "three, a preemption in a pause between",
        [*[QUIET_CRASH] * 2, without_ranks("preempted"), QUIET_CRASH],
        False,
    ),
    ("three crashes since a preemption", [ended("preempted", None), *[QUIET_CRASH] * 3], False),
    ("ten dead nodes in a row", [ended("node_failure", None)] * 10, True),
    ("a program that reported its steps once", [ended("timeout", 5), *[QUIET_TIMEOUT] * 2], False),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in SILENT], ids=[row[0] for row in SILENT])
def test_a_command_that_reports_nothing_is_not_judged_by_its_silence(attempts: Sequence[Attempt], again: bool) -> None:
    assert decision_after(attempts, RetryConfig(), QUEUE, command=True).action == ("requeue" if again else "fail")


def test_a_command_that_reports_nothing_may_be_forbidden_to_run_out_of_time() -> None:
    assert decide([QUIET_TIMEOUT], RetryConfig(time_limit=0), QUEUE, command=True).action == "fail"


def test_a_command_that_reports_nothing_waits_a_minute_before_its_third_try() -> None:
    first, second = (decision_after([QUIET_CRASH] * count, RetryConfig(), HERE, command=True) for count in (1, 2))
    assert 2 <= first.pause < 3 and 60 <= second.pause <= 72
    assert first.patience is None, "it would not be true"


# Where it goes on


def after(*attempts: Attempt, enough: bool = True, **room: Any) -> Decision:
    """The decision in a job that runs on, and has nodes enough or not."""
    possible = RestartOptions(**{"in_place": lambda without: enough, "requeue": "requeue", **room})
    return decision_after(attempts, RetryConfig(), possible)


def test_a_death_starts_again_in_place_and_a_job_that_makes_room_goes_back_to_the_queue() -> None:
    rows = {cause: after(ended(cause, 0, 5)).action for cause in BUDGETS}
    assert rows == {cause: "in_place" if cause in STAYS else "requeue" for cause in BUDGETS}
    assert {after(ended(cause, 0, 5), enough=False).action for cause in BUDGETS} == {"requeue"}
    assert {after(ended(cause, 0, 5), enough=False, requeue="successor").action for cause in BUDGETS} == {"successor"}


def test_on_this_machine_everything_goes_on_in_place() -> None:
    assert {after(ended(cause, 0, 5, nodes=()), requeue="none").action for cause in BUDGETS} == {"in_place"}
    assert after(ended("killed", 0, 5), requeue="none", enough=False).action == "stop"


# Nodes that are avoided


def died_on(*deaths: tuple[str, float], progress: bool = False, **facts: Any) -> list[Attempt]:
    """Attempts that ended for what speaks against one node, (node, minute), one after the other."""
    facts = {"cause": "killed", "evidence": "SIGBUS", "how": "requeue", **facts}
    return [
        ended(
            first=10 * n * progress, last=10 * n + 9, durable=10 * (n + 1) * progress, node=node, minute=minute, **facts
        )
        for n, (node, minute) in enumerate(deaths)
    ]


TWICE = (("node2", 0), ("node2", 10))
TURNED = ("node2", "node1")


def rotated(*deaths: tuple[int, str, Sequence[str]], **facts: Any) -> list[Attempt]:
    """Exceptions of (rank, node) alone, with the nodes in some order."""
    facts = {"signature": LINE, "alone": True, **facts}
    return [ended("crashed", 5, 6, rank=rank, node=node, nodes=nodes, **facts) for rank, node, nodes in deaths]


STAYED = rotated((0, "node1", ("node1", "node2")), (1, "node1", TURNED), (0, "node1", ("node1", "node2")))

AVOIDED: list[tuple[str, Sequence[Attempt], set[str]]] = [
    ("once is chance", died_on(("node2", 0)), set()),
    ("twice without progress", died_on(*TWICE), {"node2"}),
    ("twice with progress in between", died_on(*TWICE, progress=True), set()),
    ("twice with a newer state of a short life", died_on(*TWICE, progress=True, how="in place"), set()),
    ("thrice within an hour", died_on(("node2", 0), ("node2", 20), ("node2", 59), progress=True), {"node2"}),
    ("thrice within two hours", died_on(("node2", 0), ("node2", 50), ("node2", 100), progress=True), set()),
    ("another node between", died_on(("node2", 0), ("node1", 5), ("node2", 9)), {"node2"}),
    ("each node once", died_on(("node1", 0), ("node2", 1)), set()),
    ("by several causes", [*died_on(("node2", 0)), *died_on(("node2", 1), cause="node_failure")], {"node2"}),
    ("nothing speaks against it", died_on(*TWICE, evidence=None), set()),
    ("nobody knows where", died_on((None, 0), (None, 1)), set()),  # type: ignore[arg-type]
    ("this machine, which has no nodes", died_on(("local", 0), ("local", 1), nodes=()), set()),
    (
        "it follows its rank",
        died_on(*TWICE[:1], ("node1", 5), ("node1", 9), rank=3, signature="SIGBUS of rank 3"),
        set(),
    ),
    (
        "it follows its rank, and another error does not",
        [*died_on(("node1", 0), ("node2", 1), rank=3, signature="a"), *died_on(*TWICE, rank=4, signature="b")],
        {"node2"},
    ),
    (
        "it followed its rank two days ago",
        [*died_on(("node1", -3000), ("node2", -2990), rank=3, signature="a"), *died_on(*TWICE, rank=3, signature="a")],
        {"node2"},
    ),
    ("it follows its rank, but devices say it", died_on(*TWICE, rank=3, nature="hardware", signature="a"), {"node2"}),
    ("stays on a node with other ranks, once", STAYED[:2], set()),
    ("stays on a node with other ranks, twice", STAYED, {"node1"}),
    (
        "stays, a signal that names its rank",
        [
            *rotated((0, "node1", ("node1", "node2")), signature="SIGFPE of rank 0"),
            *rotated((1, "node1", TURNED), signature="SIGFPE of rank 1"),
            *rotated((0, "node1", ("node1", "node2")), signature="SIGFPE of rank 0"),
        ],
        {"node1"},
    ),
    ("stays, but not in that order", STAYED[:1] * 3, set()),
    ("an outage: another node had it too", [*STAYED, *rotated((5, "node2", TURNED)), *STAYED[1:]], set()),
]


@pytest.mark.parametrize(("attempts", "nodes"), [row[1:] for row in AVOIDED], ids=[row[0] for row in AVOIDED])
def test_a_node_is_avoided_when_enough_speaks_against_it(attempts: Sequence[Attempt], nodes: set[str]) -> None:
    decision = decision_after(attempts, RetryConfig(), QUEUE)
    assert (set(decision.avoid), decision.action) == (nodes, "requeue")


def test_a_device_that_fails_in_one_step_with_other_ranks_is_no_proof() -> None:
    facts = {"node": "node1", "alone": True}
    turned = [at(9, 5, rank=0, **facts), at(9, 7, rank=1, nodes=TURNED, **facts)]
    assert after(*turned).action == "in_place"
    assert after(*[at(9, 5, rank=0, **facts)] * 2).action == "fail"


def test_ranks_rotate_after_an_error_of_one_node_and_before_it_is_avoided() -> None:
    assert after(STAYED[0]).rotate
    assert not after(*STAYED).rotate, "the node has gone"
    assert not after(*rotated((0, "node1", ("node1", "node2")), alone=False)).rotate
    assert not after(*rotated((0, "node1", ("node1", "node2")), evidence="SIGBUS")).rotate, "it speaks for itself"
    assert not after(*rotated((0, "node1", ("node1",)))).rotate, "there is no other"


def test_a_spare_takes_the_place_at_the_first_piece_of_evidence() -> None:
    decision = after(*died_on(("node2", 0)), spares=1)
    assert (decision.action, list(decision.avoid)) == ("in_place", ["node2"])
    assert not after(*died_on(("node2", 0))).avoid
    assert not after(ended("crashed", 0, 5, node="node2"), spares=1).avoid


def test_two_nodes_are_avoided_for_a_day_and_no_more() -> None:
    avoid = {"a": 90_000.0, "b": 90_000.0}

    def avoided(minute: float, nodes: int = 2) -> set[str]:
        attempts = died_on(("c", minute - 1), ("c", minute), nodes=["c", *map(str, range(nodes - 1))])
        attempts[0] = replace(attempts[0], ended=replace(attempts[0].ended, avoid=avoid))  # type: ignore[type-var]
        return set(decision_after(attempts, RetryConfig(), QUEUE).avoid)

    assert avoided(10) == {"a", "b"}
    assert avoided(10, nodes=30) == {"a", "b", "c"}, "a tenth of the job's nodes"
    assert avoided(1501) == {"c"}


def test_a_bad_node_is_left_out_in_the_job_rather_than_in_the_next_one() -> None:
    asked: list[frozenset[str]] = []
    deaths = died_on(*TWICE)
    assert after(*deaths).action == "in_place"
    decision = after(*deaths, in_place=lambda without: bool(asked.append(without)), spares=0)
    assert (decision.action, set(decision.avoid), asked[0]) == ("requeue", {"node2"}, {"node2"})


def test_a_bad_node_that_nothing_could_replace_is_kept() -> None:
    nowhere = {"in_place": lambda without: not without, "elsewhere": lambda without: False}
    decision = after(*died_on(*TWICE), **nowhere)
    assert (decision.action, decision.avoid) == ("in_place", {})


def avoiding(attempt: Attempt, *nodes: str) -> list[Attempt]:
    """An attempt, and one before it after which the run avoids some nodes."""
    before = ended("preempted", 0)
    day = dict.fromkeys(nodes, 90_000.0)
    return [replace(before, ended=replace(before.ended, avoid=day)), attempt]  # type: ignore[type-var]


def test_an_avoided_node_is_not_gone_back_to_while_the_job_could_have_another_one() -> None:
    lost = avoiding(ended("node_failure", 0, 5, node="node1"), "node2")
    for elsewhere, action in ((True, "requeue"), (False, "in_place")):
        room = RestartOptions(
            requeue="requeue",
            in_place=lambda without: not without,  # with the avoided one there are enough
            elsewhere=lambda without, answer=elsewhere: answer,  # type: ignore[misc]
        )
        assert decision_after(lost, RetryConfig(), room).action == action


@pytest.mark.parametrize("cause", ["timeout", "preempted", "node_failure"])
def test_a_scheduler_that_is_ending_the_job_is_not_asked_what_changes_nothing(cause: Cause) -> None:
    def ask(without: frozenset[str]) -> bool:
        raise AssertionError("asked")

    room = RestartOptions(requeue="requeue", elsewhere=ask)
    assert decision_after(avoiding(ended(cause, 0, 5), "node2"), RetryConfig(), room).action == "requeue"


def test_a_job_of_one_node_goes_once_to_another_node_before_it_is_interrupted() -> None:
    deaths = [ended("crashed", 5, 6, minute=minute, nodes=["a"], node="a", next_at=1e9) for minute in (0, 1, 2, 60)]
    decision = after(*deaths)
    assert (decision.action, list(decision.avoid), decision.gave_up) == ("requeue", ["a"], False)
    there = ended("crashed", 5, 6, minute=61, nodes=["b"], node="b")
    assert (after(*deaths, there).action, after(*deaths, there).gave_up) == ("stop", True)
    assert after(*deaths, elsewhere=lambda without: False).gave_up, "no other node is up"
