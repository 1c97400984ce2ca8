"""`checkpoint.every: auto`: as often as what a checkpoint costs and how often the run dies make worth while."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobkit.run.config import CheckpointConfig
from jobkit.run.status import Attempt
from jobkit.worker.checkpoint_schedule import (
    FIRST_SECONDS,
    MAX_OVERHEAD,
    MAX_SECONDS,
    MIN_MEMORY_SECONDS,
    PRIOR_SECONDS,
    AutoInterval,
    CheckpointSchedule,
    MemorySchedule,
    mean_time_between_failures,
)

HOUR = 3600.0


def interval(mtbf: float, *observed: tuple[float, float]) -> AutoInterval:
    """The interval after checkpoints of (seconds they held up the training, seconds until they were durable)."""
    auto = AutoInterval(mtbf)
    for stall, seconds in observed:
        auto.observe(stall, seconds)
    return auto


def test_the_first_checkpoint_comes_soon_since_its_cost_is_not_known() -> None:
    assert interval(8 * HOUR).seconds == FIRST_SECONDS


YOUNG = [
    ("half a second, every 2 hours", 2 * HOUR, [(0.5, 2.0)], math.sqrt(2 * 0.5 * 7200)),
    ("100 ms, every 8 hours", 8 * HOUR, [(0.1, 1.0)], math.sqrt(2 * 0.1 * 28800)),
    ("a run that hardly ever dies", 1e6 * HOUR, [(1.0, 1.0)], MAX_SECONDS),
    ("a run that dies all the time, though that takes more than a hundredth", 60.0, [(2.0, 2.0)], math.sqrt(240)),
    ("a checkpoint that costs nothing, on a slow disk", 8 * HOUR, [(0.0, 20.0)], 40.0),
    ("a checkpoint that costs nothing at all", 8 * HOUR, [(0.0, 0.0)], 0.0),
    ("more than half an hour, where that would take more than a hundredth", 40 * HOUR, [(20.0, 20.0)], 2000.0),
    ("more than half an hour, if that is best", 8 * HOUR, [(60.0, 60.0)], math.sqrt(2 * 60 * 28800)),
    ("a disk that takes an hour", 8 * HOUR, [(1.0, HOUR)], 2 * HOUR),
]


@pytest.mark.parametrize(("mtbf", "observed", "seconds"), [row[1:] for row in YOUNG], ids=[row[0] for row in YOUNG])
def test_the_interval_is_youngs_within_bounds(mtbf: float, observed: list[tuple[float, float]], seconds: float) -> None:
    assert interval(mtbf, *observed).seconds == pytest.approx(seconds)


def test_a_cost_that_changes_is_followed() -> None:
    auto = interval(2 * HOUR, (1.0, 1.0), (3.0, 3.0))
    assert auto.cost == pytest.approx(2.0)
    for _ in range(20):
        auto.observe(8.0, 8.0)
    assert auto.cost == pytest.approx(8.0, rel=1e-4)
    assert auto.seconds == pytest.approx(math.sqrt(2 * 8 * 7200), rel=1e-3)


def test_a_disk_that_has_become_slow_counts_at_once_and_is_forgiven_slowly() -> None:
    auto = interval(8 * HOUR, (0.0, 1.0), (0.0, 100.0))
    assert auto.seconds == 200.0
    auto.observe(0.0, 1.0)
    assert 2.0 < auto.seconds < 200.0


def test_the_interval_and_its_reasons_are_told() -> None:
    assert "not known yet" in interval(8 * HOUR).explain()
    text = interval(2 * HOUR, (2.0, 2.0)).explain()
    assert "every 170 s" in text
    assert "2 s" in text
    assert "One failure in 2:00:00 is assumed until this run has had one" in text


@pytest.mark.parametrize(
    ("mtbf", "earlier", "known_by"),
    [
        ("1h", 1, "One failure in 1:00:00 is what checkpoint.mtbf says"),
        ("auto", 0, "One failure in 8:00:00 is assumed until this run has had one"),
        ("auto", 1, "One failure in 4:30:00 is estimated: this run has had 1"),
    ],
)
def test_where_the_time_between_failures_is_from_is_told(mtbf: str, earlier: int, known_by: str) -> None:
    schedule = CheckpointSchedule(CheckpointConfig(every="auto", mtbf=mtbf), [lived(HOUR, hard=True)] * earlier)
    assert schedule.auto is not None and schedule.auto.explain().endswith(known_by)


# Snapshots in memory


def memory_schedule(every: str | int | bool, *stalls: float) -> tuple[bool, list[int], bool]:
    """After snapshots that held up the training so long: whether it is off, after which of 12 steps one is due, and
    whether one is due by the clock at once.
    """
    schedule = MemorySchedule(every)
    for stall in stalls:
        schedule.observe(stall)
    return schedule.is_off, [step for step in range(1, 13) if schedule.is_due_after(step)], schedule.is_due_by_time()


MEMORY: list[tuple[str, str | int | bool, list[float], tuple[bool, list[int], bool]]] = [
    ("off", "off", [], (True, [], False)),
    ("off without quotes", False, [], (True, [], False)),
    ("every five steps", 5, [], (False, [5, 10], False)),
    ("every step", 1, [0.5], (False, list(range(1, 13)), False)),
    ("a time", "30s", [], (False, [], False)),
    ("auto, whose first comes at once, for then its cost is known", "auto", [], (False, [], True)),
    ("auto, after one", "auto", [0.5], (False, [], False)),
]


@pytest.mark.parametrize(("every", "stalls", "due"), [row[1:] for row in MEMORY], ids=[row[0] for row in MEMORY])
def test_a_snapshot_is_due_as_the_yaml_says(
    every: str | int | bool, stalls: list[float], due: tuple[bool, list[int], bool]
) -> None:
    assert memory_schedule(every, *stalls) == due


@pytest.mark.parametrize(("stall", "seconds"), [(0.5, 50.0), (0.04, 4.0), (0.0001, MIN_MEMORY_SECONDS)])
def test_snapshots_of_auto_hold_up_the_training_a_hundredth_of_the_time(stall: float, seconds: float) -> None:
    schedule = MemorySchedule("auto")
    schedule.observe(3.0)
    schedule.observe(stall)
    assert schedule.seconds == pytest.approx(seconds)


LIVED = [
    ("a day without a failure", [24 * HOUR], [], math.sqrt(2 * 0.5 * 86400)),
    ("a week without one", [7 * 24 * HOUR], [], math.sqrt(2 * 0.5 * 7 * 86400)),
    ("a day and a failure", [12 * HOUR], [12 * HOUR], math.sqrt(2 * 0.5 * 43200)),
    ("a failure every minute: never more than a hundredth", [], [60.0] * 30, 0.5 / MAX_OVERHEAD),
    ("ten years without one", [87600 * HOUR], [], MAX_SECONDS),
]


@pytest.mark.parametrize(("quiet", "failed", "seconds"), [row[1:] for row in LIVED], ids=[row[0] for row in LIVED])
def test_snapshots_of_auto_are_rarer_the_longer_the_run_lives(
    quiet: list[float], failed: list[float], seconds: float
) -> None:
    earlier = [*[lived(one) for one in quiet], *[lived(one, hard=True) for one in failed]]
    schedule = MemorySchedule("auto", earlier)
    schedule.observe(0.5)
    assert schedule.seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("every", "until_checkpoint", "due"), [("auto", 24.0, False), ("auto", 26.0, True), ("1s", 0.1, True)]
)
def test_no_snapshot_of_auto_is_taken_soon_before_a_checkpoint_that_lies_in_memory_too(
    monkeypatch: pytest.MonkeyPatch, every: str, until_checkpoint: float, due: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr("jobkit.worker.checkpoint_schedule.time.monotonic", lambda: now)
    schedule = MemorySchedule(every)
    schedule.observe(0.5)
    now += 60.0
    assert schedule.is_due_by_time(until_checkpoint) is due
    assert schedule.is_due_by_time()


# How often it dies


def lived(seconds: float, hard: bool = False, **more: Any) -> Attempt:
    failure = {"error": "killed"} if hard else None
    return Attempt(id=1, cluster="slurm", job_id="7", started=1000.0, ended=1000.0 + seconds, failure=failure, **more)


FAILURES: list[tuple[str, list[Attempt], float]] = [
    ("nothing known", [], PRIOR_SECONDS),
    ("one that ended gracefully", [lived(HOUR)], PRIOR_SECONDS + HOUR),
    ("one that died", [lived(HOUR, hard=True)], (PRIOR_SECONDS + HOUR) / 2),
    ("many that died soon", [lived(60, hard=True)] * 99, (PRIOR_SECONDS + 99 * 60) / 100),
    ("graceful ones between", [lived(HOUR), lived(HOUR, hard=True), lived(HOUR)], (PRIOR_SECONDS + 3 * HOUR) / 2),
    ("an end before its start, by a clock that is off", [lived(-HOUR, hard=True)], PRIOR_SECONDS / 2),
]


@pytest.mark.parametrize(("attempts", "mtbf"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES])
def test_the_time_between_failures_is_what_the_run_has_seen(attempts: list[Attempt], mtbf: float) -> None:
    assert mean_time_between_failures(attempts) == pytest.approx(mtbf)


def test_an_attempt_that_has_not_ended_has_not_failed() -> None:
    running = Attempt(id=1, cluster="slurm", job_id="7", started=1000.0)
    assert mean_time_between_failures([running]) == PRIOR_SECONDS
