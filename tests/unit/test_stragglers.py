"""A rank that holds the others up is named, by its own time in a step; a rank that waits for it is not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from jobkit.cli.status import describe as status_lines
from jobkit.run.rundir import RunDir
from jobkit.run.status import derive
from jobkit.worker.stragglers import EACH_RANK, StragglerDetector, curves
from jobkit.worker.timing import ComputeTimer, HostEvent

# Own time


def test_own_time_ends_with_the_last_forward_of_a_step() -> None:
    own, model = ComputeTimer(), torch.nn.Linear(2, 2)
    own.watch(model)
    for _ in range(3):
        own.begin()
        for _ in range(2):
            time.sleep(0.02)
            model(torch.ones(1, 2))
        time.sleep(0.05)  # waiting for others, in backward
        own.end()
    seconds, whole = own.take()
    assert seconds >= 0.04 and whole - seconds >= 0.05
    assert own.take() == (0.0, 0.0)


def test_own_time_ends_before_the_first_forward_where_that_waits_for_others() -> None:
    own, model = ComputeTimer(), torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: time.sleep(0.05))
    own.watch(model, forward_waits=True)
    own.begin()
    time.sleep(0.02)
    for _ in range(2):
        model(torch.ones(1, 2))
    own.end()
    seconds, whole = own.take()
    assert seconds >= 0.02 and whole - seconds >= 0.1


def test_an_evaluation_at_the_top_of_a_step_is_not_its_own_time() -> None:
    own, model = ComputeTimer(), torch.nn.Linear(2, 2)
    own.watch(model)
    own.begin()
    started = time.perf_counter()
    time.sleep(0.05)
    model(torch.ones(1, 2))
    own.begin()  # as ctx.evaluate does when it is over
    model(torch.ones(1, 2))
    own.end()
    elapsed = time.perf_counter() - started
    assert all(seconds <= elapsed - 0.05 for seconds in own.take())


class LateEvent(HostEvent):
    """A mark of a device that has not come to it yet."""

    arrived = False

    def query(self) -> bool:
        return LateEvent.arrived


def test_marks_that_the_device_has_not_reached_are_read_the_next_time() -> None:
    own, model = ComputeTimer(LateEvent), torch.nn.Linear(2, 2)
    own.watch(model)
    own.begin()
    model(torch.ones(1, 2))
    own.end()
    LateEvent.arrived = False
    assert own.take()[0] == 0.0
    LateEvent.arrived = True
    assert own.take()[0] > 0.0


# The decision

EVEN, SLOW, ABIT = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 2.0, 1.0], [1.0, 1.1, 1.4, 1.0]

EXCHANGED: list[tuple[str, list[list[float]], list[set[int]]]] = [
    ("all even", [EVEN] * 5, [set()] * 5),
    ("slow three times", [SLOW] * 5, [set(), set(), {2}, {2}, {2}]),
    ("slow twice, and again twice", [SLOW, SLOW, EVEN, SLOW, SLOW], [set()] * 5),
    ("below the factor", [ABIT] * 4, [set()] * 4),
    ("recovered", [SLOW] * 3 + [EVEN] * 3, [set(), set(), {2}, {2}, {2}, set()]),
    ("recovered for a moment only", [SLOW] * 3 + [EVEN, EVEN, SLOW, EVEN, EVEN], [set()] * 2 + [{2}] * 6),
    ("two of four", [[1.0, 2.0, 2.0, 1.0]] * 3, [set(), set(), {1, 2}]),
    ("one of two", [[1.0, 1.6]] * 3, [set(), set(), {1}]),
    ("all slower than before", [SLOW] * 3 + [[2.0] * 4] * 3, [set(), set(), {2}, {2}, {2}, set()]),
]


@pytest.mark.parametrize(("exchanged", "slow"), [row[1:] for row in EXCHANGED], ids=[row[0] for row in EXCHANGED])
def test_who_is_slow(exchanged: list[list[float]], slow: list[set[int]]) -> None:
    judge, found = StragglerDetector(), []
    for seconds in exchanged:
        judge.look(seconds, step_seconds=3.0)
        found.append(set(judge.slow))
    assert found == slow


def test_a_rank_that_is_slow_at_what_takes_no_time_holds_nobody_up() -> None:
    judge = StragglerDetector()
    for _ in range(5):
        judge.look([0.001, 0.009, 0.001], step_seconds=1.0)
    assert judge.slow == set()


@pytest.mark.parametrize("ranks", [2, EACH_RANK, EACH_RANK + 1, 512])
def test_few_ranks_have_a_curve_each_and_many_a_summary(ranks: int) -> None:
    found = curves([1.0] * (ranks - 1) + [3.0])
    if ranks <= EACH_RANK:
        assert found == {f"perf/rank_seconds/{rank}": 1.0 for rank in range(ranks - 1)} | {
            f"perf/rank_seconds/{ranks - 1}": 3.0
        }
    else:
        values = {"min": 1.0, "median": 1.0, "max": 3.0, "slowest_rank": ranks - 1}
        assert found == {f"perf/rank_seconds/{name}": value for name, value in values.items()}


# The status

NAMED = {"event": "straggler", "attempt": 1, "rank": 5, "host": "node3", "seconds": 0.4, "median": 0.1, "factor": 4.0}
BEGUN = [
    {"event": "submitting", "cluster": "slurm", "scheduler": "slurm"},
    {"event": "started", "attempt": 1, "job_id": "7"},
    {"event": "resumed", "attempt": 1, "step": 0},
]

WHILE_IT_LASTS: list[tuple[str, list[dict[str, Any]], list[int]]] = [
    ("named", [NAMED], [5]),
    ("two", [NAMED, NAMED | {"rank": 6}], [5, 6]),
    ("recovered", [NAMED, NAMED | {"rank": 6}, {"event": "straggler_over", "attempt": 1, "rank": 5}], [6]),
    ("interrupted", [NAMED, {"event": "interrupted", "attempt": 1, "cause": "preempted"}], []),
    ("lost", [NAMED, {"event": "started", "attempt": 2, "job_id": "7"}], []),
    ("finished", [NAMED, {"event": "finished", "attempt": 1, "step": 9}], []),
    ("cancelled without a last word", [NAMED, {"event": "cancelled", "attempt": 1}], []),
]


@pytest.mark.parametrize(("then", "ranks"), [row[1:] for row in WHILE_IT_LASTS], ids=[row[0] for row in WHILE_IT_LASTS])
def test_the_status_names_a_straggler_while_it_lasts(then: list[dict[str, Any]], ranks: list[int]) -> None:
    now = derive([{"time": float(second), **event} for second, event in enumerate([*BEGUN, *then])])
    assert [one.rank for one in now.stragglers] == ranks
    lines = [line for line in status_lines(RunDir("run"), now) if line.startswith("slow:")]
    assert [f"rank {rank} on node3" in line for rank, line in zip(ranks, lines, strict=True)] == [True] * len(ranks)
