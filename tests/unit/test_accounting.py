"""Where the wall time of a run went: every second of it is somewhere, once."""

from __future__ import annotations

from typing import Any

import pytest

from jobkit.run.accounting import Account, account, goodput
from jobkit.run.records import Progress
from jobkit.run.status import Status, derive

PARTS = ("queue", "startup", "useful", "repeated", "lost", "checkpoints", "ending")


def parts(account: Account) -> dict[str, float]:
    """Where the time went, without what took none."""
    return {name: seconds for name in PARTS if (seconds := getattr(account, name))}


def total(account: Account) -> float:
    return sum(parts(account).values())


def span(first_step: int = 0, last_step: int = 100, **changes: Any) -> dict[str, Any]:
    """An attempt that was queued at 100, started at 110, resumed at 130 and ended at 330, in which it did 100 steps."""
    times = {"queued": 100.0, "started": 110.0, "resumed": 130.0, "last_seen": None, "ended": 330.0}
    return {**times, "steps": range(first_step, last_step), "stalled": 0.0, **changes}


ACCOUNTS: list[tuple[str, dict[str, Any], int, dict[str, float], tuple[int, int]]] = [
    ("new steps alone", span(), 0, {"queue": 10, "startup": 20, "useful": 200}, (100, 0)),
    ("started by hand", span(queued=None), 0, {"startup": 20, "useful": 200}, (100, 0)),
    (
        "with checkpoints",
        span(stalled=40.0),
        0,
        {"queue": 10, "startup": 20, "useful": 160, "checkpoints": 40},
        (100, 0),
    ),
    (
        "a quarter repeated",
        span(first_step=50, last_step=150),
        75,
        {"queue": 10, "startup": 20, "useful": 150, "repeated": 50},
        (75, 25),
    ),
    (
        "a quarter repeated, with checkpoints",
        span(first_step=50, last_step=150, stalled=40.0),
        75,
        {"queue": 10, "startup": 20, "useful": 120, "repeated": 40, "checkpoints": 40},
        (75, 25),
    ),
    ("all repeated", span(), 120, {"queue": 10, "startup": 20, "repeated": 200}, (0, 100)),
    ("resumed where the last one ended", span(first_step=50), 50, {"queue": 10, "startup": 20, "useful": 200}, (50, 0)),
    (
        "died, which was found out a while later",
        span(last_seen=230.0),
        0,
        {"queue": 10, "startup": 20, "useful": 100, "ending": 100},
        (100, 0),
    ),
    (
        "died in its first step",
        span(last_seen=None, last_step=0),
        0,
        {"queue": 10, "startup": 20, "ending": 200},
        (0, 0),
    ),
    (
        "last seen before its loop",
        span(last_seen=120.0, last_step=0),
        0,
        {"queue": 10, "startup": 20, "ending": 200},
        (0, 0),
    ),
    ("last seen after its end", span(last_seen=340.0), 0, {"queue": 10, "startup": 20, "useful": 200}, (100, 0)),
    ("died before its loop", span(resumed=None, last_step=0), 0, {"queue": 10, "startup": 220}, (0, 0)),
    (
        "started before it was queued, by a clock that is off",
        span(queued=111.0),
        0,
        {"startup": 20, "useful": 200},
        (100, 0),
    ),
    ("running", span(ended=None, last_seen=330.0), 0, {"queue": 10, "startup": 20, "useful": 200}, (100, 0)),
    ("running, without a report yet", span(ended=None, last_step=0), 0, {"queue": 10, "startup": 20}, (0, 0)),
    ("running, before its loop", span(ended=None, resumed=None, last_step=0), 0, {"queue": 10}, (0, 0)),
]


@pytest.mark.parametrize(
    ("one", "best", "expected", "steps"), [row[1:] for row in ACCOUNTS], ids=[row[0] for row in ACCOUNTS]
)
def test_the_account_of_an_attempt(
    one: dict[str, Any], best: int, expected: dict[str, float], steps: tuple[int, int]
) -> None:
    found = account(**one, best_before=best)
    assert parts(found) == expected
    assert (found.steps, found.repeated_steps) == steps
    if one["queued"] is not None and one["queued"] <= one["started"]:
        assert total(found) == found.until - one["queued"]


def test_goodput_is_the_useful_part_of_the_time_since_the_first_start() -> None:
    first = account(**span(stalled=40.0), best_before=0)
    second = account(**span(100, 150, queued=330.0, started=340.0, resumed=360.0, ended=510.0), best_before=100)
    assert goodput([first], 110.0) == pytest.approx(160 / 220)
    assert goodput([first, second], 110.0) == pytest.approx((160 + 150) / 400)


def test_there_is_no_goodput_before_there_is_time() -> None:
    assert goodput([], 100.0) is None
    assert goodput([account(**span(ended=None, resumed=None, last_step=0), best_before=0)], 110.0) is None


# A whole journal

JOURNAL: list[tuple[float, str, dict[str, Any]]] = [
    (0, "submitting", {"cluster": "slurm", "scheduler": "slurm", "code": "c0de"}),
    (1, "submitted", {"job_id": "7"}),
    (10, "started", {"attempt": 1, "job_id": "7"}),
    (30, "resumed", {"attempt": 1, "step": 0, "total_steps": 100}),
    (60, "checkpoint", {"attempt": 1, "step": 20, "stall": 4.0}),
    # A graceful preemption: a checkpoint of the last step.
    (92, "checkpoint", {"attempt": 1, "step": 40, "stall": 2.0}),
    (94, "interrupted", {"attempt": 1, "cause": "preempted", "step": 40}),
    (94, "requeued", {"job_id": "7", "cause": "preempted"}),
    (194, "started", {"attempt": 2, "job_id": "7"}),
    (200, "resumed", {"attempt": 2, "step": 40, "total_steps": 100}),
    (231, "checkpoint", {"attempt": 2, "step": 50, "stall": 1.0}),
    # A hard death at step 60, ten steps after the last checkpoint, that was found out 39 seconds later.
    (
        300,
        "interrupted",
        {"attempt": 2, "cause": "killed", "failure": {"rank": 1}, "reached": 60, "last_seen": 261.0},
    ),
    (300, "requeued", {"job_id": "7", "cause": "killed"}),
    (310, "started", {"attempt": 3, "job_id": "7"}),
    (320, "resumed", {"attempt": 3, "step": 50, "total_steps": 100}),
]
PROGRESS = {"attempt": 3, "step": 70, "total_steps": 100, "time": 360.0}


def status(
    count: int | None = None, progress: dict[str, Any] | None = None, *more: tuple[float, str, dict[str, Any]]
) -> Status:
    """The status after the first `count` events of the journal and some more."""
    events = [{"time": float(at), "event": name, **fields} for at, name, fields in [*JOURNAL[:count], *more]]
    return derive(events, Progress(**progress) if progress else None)


def accounts(found: Status) -> list[Account]:
    return [attempt.account for attempt in found.attempts if attempt.account]


def test_a_run_that_was_preempted_killed_and_runs_again_knows_where_its_time_went() -> None:
    first, second, third = accounts(status(None, PROGRESS))
    assert parts(first) == {"queue": 10, "startup": 20, "useful": 58, "checkpoints": 6}
    assert parts(second) == {"queue": 100, "startup": 6, "useful": 60, "checkpoints": 1, "ending": 39}
    assert parts(third) == {"queue": 10, "startup": 10, "useful": 20, "repeated": 20}
    assert [(one.steps, one.repeated_steps) for one in (first, second, third)] == [(40, 0), (20, 0), (10, 10)]


def test_every_second_is_somewhere() -> None:
    found = status(None, PROGRESS)
    assert sum(map(total, accounts(found))) == PROGRESS["time"]
    assert found.goodput == pytest.approx((58 + 60 + 20) / (360 - 10))


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15])
def test_every_second_is_somewhere_at_any_time(count: int) -> None:
    found = status(count)
    booked = accounts(found)
    assert sum(map(total, booked)) == booked[-1].until
    assert all(seconds >= 0 for one in booked for seconds in parts(one).values())


@pytest.mark.parametrize("progress", [{**PROGRESS, "attempt": 2}, None])
def test_the_report_of_an_attempt_that_is_over_says_nothing_of_the_one_that_runs(
    progress: dict[str, Any] | None,
) -> None:
    third = accounts(status(None, progress))[2]
    assert parts(third) == {"queue": 10, "startup": 10}
    assert (third.steps, third.repeated_steps) == (0, 0)


def test_a_hard_end_is_told_by_the_last_report_where_the_journal_has_no_more() -> None:
    without = [(300.0, "interrupted", {"attempt": 2, "cause": "killed", "failure": {}})]
    second = accounts(status(11, {"attempt": 2, "step": 60, "time": 261.0}, *without))[1]
    assert parts(second) == {"queue": 100, "startup": 6, "useful": 30, "lost": 30, "checkpoints": 1, "ending": 39}
    assert (second.steps, second.lost_steps) == (20, 10)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [(0, {"lost": 200}), (75, {"useful": 150, "lost": 50}), (100, {"useful": 200}), (None, {"useful": 200})],
)
def test_steps_that_no_checkpoint_of_a_stopped_run_has_are_not_useful(
    kept: int | None, expected: dict[str, float]
) -> None:
    found = account(**span(), best_before=0, kept=kept)
    assert parts(found) == {"queue": 10, "startup": 20, **expected}
    assert found.lost_steps == (0 if kept is None else 100 - kept)


def test_of_repeated_steps_none_is_lost_again() -> None:
    found = account(**span(), best_before=60, kept=0)
    assert parts(found) == {"queue": 10, "startup": 20, "repeated": 120, "lost": 80}


def test_a_run_that_failed_before_its_first_checkpoint_has_done_nothing_useful() -> None:
    died = (330, "failed", {"attempt": 1, "cause": "crashed", "reached": 60, "error": "x"})
    found = status(4, None, died)
    assert found.step == 0 and found.goodput == 0.0
    assert accounts(found)[0].lost_steps == 60


def test_steps_that_were_lost_twice_are_repeated_twice() -> None:
    found = status(
        None,
        None,
        (360, "interrupted", {"attempt": 3, "cause": "killed", "failure": {}, "reached": 60, "last_seen": 350.0}),
        (360, "requeued", {"job_id": "7"}),
        (360, "started", {"attempt": 4, "job_id": "7"}),
        (360, "resumed", {"attempt": 4, "step": 50}),
        (400, "finished", {"attempt": 4, "step": 70, "result": None}),
    )
    booked = accounts(found)
    assert [(one.steps, one.repeated_steps) for one in booked] == [(40, 0), (20, 0), (0, 10), (10, 10)]
    assert parts(booked[3]) == {"useful": 20, "repeated": 20}
    assert sum(map(total, booked)) == 400


def test_a_run_that_was_never_interrupted_did_nothing_but_start_and_train() -> None:
    found = status(4, None, (130, "finished", {"attempt": 1, "step": 100, "result": None}))
    assert parts(accounts(found)[0]) == {"queue": 10, "startup": 20, "useful": 100}
    assert found.goodput == pytest.approx(100 / 120)


def test_a_run_that_waits_for_its_first_start_has_no_goodput() -> None:
    assert status(2).goodput is None


def test_goodput_is_no_better_for_the_time_nobody_had_submitted_it() -> None:
    again = [
        (1000.0, "submitting", {"cluster": "slurm", "scheduler": "slurm"}),
        (1010.0, "started", {"attempt": 2, "job_id": "8"}),
        (1020.0, "resumed", {"attempt": 2, "step": 40}),
        (1080.0, "finished", {"attempt": 2, "step": 100, "result": None}),
    ]
    found = status(7, None, *again)
    assert parts(accounts(found)[1]) == {"queue": 10, "startup": 10, "useful": 60}
    assert found.goodput == pytest.approx((58 + 60) / (1080 - 10))
