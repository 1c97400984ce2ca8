"""Where the wall time of a run went: a table of attempts."""

from __future__ import annotations

import pytest
from harness.journals import START, began, ended, submitted

from jobkit.run.accounting import accounts, goodput
from jobkit.run.records import Event, Progress, Requeued
from jobkit.run.status import Status, fold


def _status(*events: Event) -> Status:
    status = Status(name="toy")
    for event in events:
        status = fold(status, event)
    return status


def _ran(attempt: int, at: float, first: int, last: int, durable: int, **fields: object) -> list[Event]:
    """An attempt that began at `at`, stepped from 10 s to 50 s later, and ended 60 s later."""
    end = {"next": "requeue", "cause": "preempted"} | fields
    times = {"loop_began": START + at + 10, "last_seen": START + at + 50}
    steps = {"first_step": first, "last_step": last, "durable_step": durable}
    return [
        began(attempt, START + at, how="requeue"),
        ended(attempt=attempt, time=START + at + 60, **times, **steps, **end),
    ]


def test_an_attempts_time_is_divided_into_queue_start_steps_and_end() -> None:
    (account,) = accounts(_status(submitted(), *_ran(1, 5, 0, 40, 40, cause="finished", next="stop")))
    assert (account.queue, account.starting, account.useful, account.ending) == (5, 10, 40, 10)
    assert (account.first_step, account.last_step, account.repeated_steps) == (0, 40, 0)


def test_steps_done_before_are_repeated_and_not_useful() -> None:
    queued = Requeued(job_id="17", time=START + 70)
    status = _status(submitted(), *_ran(1, 0, 0, 40, 30), queued, *_ran(2, 100, 30, 70, 70))
    second = accounts(status)[1]
    assert (second.queue, second.repeated_steps, second.useful) == (30, 10, 30)
    assert goodput(accounts(status)) == pytest.approx((40 + 30) / 160)


def test_an_attempt_without_steps_has_only_a_start() -> None:
    status = _status(submitted(), began(1, START + 5), ended("crashed", "fail", time=START + 25))
    (account,) = accounts(status)
    assert (account.starting, account.useful, goodput([account])) == (20, 0, None)


def test_the_running_attempt_counts_by_its_progress() -> None:
    status = _status(submitted(), began(1, START + 5))
    progress = Progress(attempt=1, time=START + 45, loop_began=START + 15, first_step=0, step=30)
    (account,) = accounts(status, progress, START + 50)
    assert (account.starting, account.useful, account.ending, account.last_step) == (10, 30, 5, 30)
    (stale,) = accounts(status, Progress(attempt=7, time=START, step=3, first_step=0), START + 50)
    assert (stale.starting, stale.last_step) == (45, None)


def test_an_attempt_in_place_waited_in_no_queue() -> None:
    events = [submitted(), *_ran(1, 0, 0, 40, 40, next="in_place"), began(2, START + 61, how="in place")]
    assert accounts(_status(*events), None, START + 70)[1].queue == 0


def test_steps_are_repeated_up_to_the_furthest_attempt_and_to_ones_own_last_step() -> None:
    runs = [*_ran(1, 0, 0, 60, 50), *_ran(2, 100, 50, 55, 50), *_ran(3, 200, 50, 70, 70)]
    assert [account.repeated_steps for account in accounts(_status(submitted(), *runs))] == [0, 5, 10]
