"""When saves are due."""

from __future__ import annotations

import time

import pytest

from jobkit.loop.checkpoint_interval import FIRST_SECONDS, PRIOR_SECONDS, AutoInterval, Clock, History
from jobkit.run.records import AttemptEnded


def test_a_number_is_of_steps_and_a_text_is_a_time() -> None:
    assert [step for step in range(1, 2000) if Clock.of(500, 0.0).is_due_after(step)] == [500, 1000, 1500]
    assert Clock.of("10min", 0.0).seconds == 600
    off = Clock.of("off", 0.0)
    assert not (off.is_due_after(10) or off.is_due_now())
    assert not Clock.of(False, 0.0).is_due_now()
    assert Clock.of("auto", 30.0).seconds == 30.0


def test_time_counts_from_the_last_save() -> None:
    clock = Clock(seconds=100.0)
    assert not clock.is_due_now()
    clock.since = time.monotonic() - 101
    assert clock.is_due_now()
    clock.restart()
    assert not clock.is_due_now()


def test_deaths_shorten_the_interval_and_stops_do_not() -> None:
    def ended(cause: str) -> tuple[float, AttemptEnded]:
        return 0.0, AttemptEnded(attempt=1, cause=cause, next="in_place", time=3600.0)  # type: ignore[arg-type]

    calm, deadly = History.of([ended("preempted")] * 3), History.of([ended("killed")] * 3)
    assert calm.seconds_between_deaths == PRIOR_SECONDS + 3 * 3600
    assert deadly.seconds_between_deaths == (PRIOR_SECONDS + 3 * 3600) / 4


@pytest.mark.parametrize(
    ("stall", "seconds", "expected"),
    [(0.1, 1.0, 75.8947), (100.0, 1.0, 2400.0), (0.001, 60.0, 120.0), (90.0, 1.0, 2276.84)],
)
def test_auto_is_youngs_interval_within_its_bounds(stall: float, seconds: float, expected: float) -> None:
    interval = AutoInterval(28800.0)
    assert interval.seconds == FIRST_SECONDS
    interval.observe(stall, seconds)
    assert interval.seconds == pytest.approx(expected, rel=1e-3)
