"""How long a rank may be silent: the clock is a number."""

from __future__ import annotations

import math

import pytest

from jobkit.agent.watchdog import LEAST_SECONDS, OUTSIDE_LOOP_SECONDS, Watch, limit, silence_of
from jobkit.wire.pages import Beat, Phase


def beat(phase: Phase = Phase.STEPPING, slowest: float = 1.0, beats: int = 5) -> Beat:
    return Beat(attempt=1, phase=phase, step=3, time=0.0, slowest=slowest, beats=beats)


@pytest.mark.parametrize(
    ("setting", "where", "seconds"),
    [
        ("auto", beat(), LEAST_SECONDS),
        ("auto", beat(slowest=60.0), 1200),
        ("auto", beat(slowest=0.0), OUTSIDE_LOOP_SECONDS),  # the first step may compile
        ("auto", beat(Phase.STARTING), OUTSIDE_LOOP_SECONDS),
        ("auto", beat(Phase.SAVING, slowest=200.0), 4000),
        ("10min", beat(slowest=60.0), 600),
        (5, beat(slowest=60.0), 300),  # a bare number is of minutes
        ("10min", beat(Phase.ENDING), OUTSIDE_LOOP_SECONDS),
        ("10min", beat(Phase.OUTSIDE), OUTSIDE_LOOP_SECONDS),
        ("2h", beat(Phase.ENDING), 7200),
        ("off", beat(), math.inf),
        (False, beat(), math.inf),
    ],
)
def test_silence_is_measured_by_the_slowest_step(setting: str | bool, where: Beat, seconds: float) -> None:
    assert limit(silence_of(setting), where) == seconds


def silent_at(watch: Watch, last: Beat, seconds: range) -> float | None:
    """When the watch first says so, looked at each 10 s."""
    return next((float(now) for now in seconds if watch.silence(last, now) is not None), None)


def test_a_rank_is_silent_once_it_has_not_beaten_for_too_long() -> None:
    watch = Watch(None, True, now=0.0)
    assert silent_at(watch, beat(beats=5), range(10, 200, 10)) is None
    assert silent_at(watch, beat(beats=6), range(200, 1000, 10)) == 500.0


def test_an_agent_that_was_stopped_itself_gives_its_ranks_the_whole_time_again() -> None:
    watch = Watch(None, True, now=0.0)
    assert silent_at(watch, beat(), range(10, 200, 10)) is None
    assert silent_at(watch, beat(), range(5000, 6000, 10)) == 5300.0


def test_a_program_that_never_beats_is_left_alone_and_watched_from_its_first_beat_on() -> None:
    watch = Watch(60.0, False, now=0.0)
    assert silent_at(watch, beat(Phase.STARTING, 0.0, beats=0), range(10, 5000, 10)) is None
    assert silent_at(watch, beat(), range(5000, 6000, 10)) == 5060.0
