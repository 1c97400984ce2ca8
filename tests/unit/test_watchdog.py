"""The watchdog: what it takes for a hang, what it leaves alone, and what it does about one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.files import write_json
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.supervisor import watchdog as watching
from jobkit.supervisor.watchdog import GAP_SECONDS, LEAST_SECONDS, OUTSIDE_LOOP_SECONDS, TIMES_SLOWEST, Watch, end_hung
from jobkit.worker.heartbeat import Heartbeat
from jobkit.worker.reporter import RunReporter

# How long is too long


LIMITS: list[tuple[str, str | int, int, bool, float, float]] = [
    ("fast steps", "auto", 0, True, 0.1, LEAST_SECONDS),
    ("no step yet", "auto", 0, True, 0.0, OUTSIDE_LOOP_SECONDS),
    ("no step yet, with a time of its own", "10s", 0, True, 0.0, 10.0),
    ("slow steps", "auto", 0, True, 100.0, 100 * TIMES_SLOWEST),
    ("outside the loop", "auto", 0, False, 0.1, OUTSIDE_LOOP_SECONDS),
    ("outside the loop, after a hang", "auto", 1, False, 0.1, 2 * OUTSIDE_LOOP_SECONDS),
    ("outside the loop, after slow steps", "auto", 0, False, 1000.0, 1000 * TIMES_SLOWEST),
    ("after a hang", "auto", 1, True, 0.1, 2 * LEAST_SECONDS),
    ("after three", "auto", 3, True, 0.1, 8 * LEAST_SECONDS),
    ("after three, with slow steps", "auto", 3, True, 100.0, 8 * 100 * TIMES_SLOWEST),
    ("a time, which counts as it is", "10s", 3, True, 100.0, 10.0),
    ("a number is minutes", 2, 0, True, 0.1, 120.0),
    ("a time, outside the loop", "10s", 0, False, 0.1, OUTSIDE_LOOP_SECONDS),
    ("a long time, outside the loop", "2h", 0, False, 0.1, 7200.0),
]


@pytest.mark.parametrize(
    ("setting", "false_alarms", "training", "slowest", "seconds"),
    [row[1:] for row in LIMITS],
    ids=[row[0] for row in LIMITS],
)
def test_the_limit_follows_from_the_setting_and_the_steps(
    tmp_path: Path, setting: str | int, false_alarms: int, training: bool, slowest: float, seconds: float
) -> None:
    assert Watch(RunDir(tmp_path), 1, setting, false_alarms).limit(training, slowest) == seconds


# What it sees


class Clock:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose attempt 1 is under way."""
    run = RunDir(tmp_path / "toy-12345678")
    run.logs(1).mkdir(parents=True)
    run.config_file.write_text(Config(name="toy", task="m:f").to_yaml())
    return run


def report(run: RunDir, beats: int, attempt: int = 1, training: bool = True, slowest: float = 0.0) -> None:
    own = {"attempt": attempt, "time": 1.0, "step": 7, "beats": beats, "training": training, "slowest": slowest}
    write_json(run.progress_file, own, durable=False)


def told(run: RunDir, clock: Clock, seconds: float, watch: Watch) -> str | None:
    """What the watch says after so many seconds, in which it has looked now and then."""
    until = clock.now + seconds
    while until - clock.now > GAP_SECONDS:
        clock.now += GAP_SECONDS
        if found := watch.look():
            return found
    clock.now = until
    return watch.look()


def test_a_watch_that_was_stopped_itself_says_nothing_of_that_time(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "60s")
    report(run, 3)
    assert watch.look() is None
    clock.now += 1000.0
    assert watch.look() is None
    assert told(run, clock, 61.0, watch) is not None


def test_ranks_that_go_on_are_left_alone(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "10s")
    for beats in range(1, 50):
        report(run, beats)
        assert told(run, clock, 9.0, watch) is None


def test_ranks_that_stand_still_are_told_of_with_the_step_and_the_setting(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "10s")
    report(run, 3)
    assert told(run, clock, 20.0, watch) is None, "that is when it was first seen"
    assert told(run, clock, 9.9, watch) is None
    text = told(run, clock, 0.2, watch)
    assert text == "no progress for 0:00:10 in step 7 (watchdog: 10s)"


def test_a_report_that_is_written_again_without_a_step_is_no_sign_of_life(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "10s")
    for _ in range(3):
        report(run, 3)
        found = told(run, clock, 6.0, watch)
    assert found is not None


def test_a_watch_that_is_off_says_nothing(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "off")
    report(run, 3)
    assert [told(run, clock, 1e6, watch) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("training", [False, None])
def test_before_the_loop_there_is_time_to_build_a_model(run: RunDir, clock: Clock, training: bool | None) -> None:
    if training is not None:
        report(run, 0, training=training)
    watch = Watch(run, 1, "10s")
    assert told(run, clock, 0.0, watch) is None
    assert told(run, clock, OUTSIDE_LOOP_SECONDS - 1, watch) is None
    assert "outside its loop" in str(told(run, clock, 2.0, watch))


def test_the_end_of_the_loop_is_a_sign_of_life(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "10s")
    report(run, 3)
    assert told(run, clock, 9.0, watch) is None
    report(run, 3, training=False)
    assert told(run, clock, 9.0, watch) is None
    assert told(run, clock, 100.0, watch) is None


def test_the_report_of_the_attempt_before_says_nothing(run: RunDir, clock: Clock) -> None:
    run.logs(2).mkdir()
    watch = Watch(run, 2, "10s")
    report(run, 3, attempt=1)
    assert [told(run, clock, 100.0, watch) for _ in range(3)] == [None] * 3


def test_slow_steps_are_given_many_times_their_time(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "auto")
    report(run, 3, slowest=60.0)
    assert told(run, clock, 0.0, watch) is None
    assert told(run, clock, 60 * TIMES_SLOWEST - 1, watch) is None
    assert told(run, clock, 2.0, watch) is not None


def test_ranks_whose_reports_the_disk_does_not_take_are_not_called_hung(run: RunDir, clock: Clock) -> None:
    watch = Watch(run, 1, "10s")
    report(run, 3)
    assert told(run, clock, 0.0, watch) is None
    run.logs(1).rename(run.path / "away")
    assert told(run, clock, 11.0, watch) is None
    (run.path / "away").rename(run.logs(1))
    assert told(run, clock, 9.0, watch) is None, "they get their time anew"
    assert told(run, clock, 2.0, watch) is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"attempt": 1}'])
def test_a_report_that_says_nothing_is_no_hang(run: RunDir, clock: Clock, content: str) -> None:
    run.progress_file.write_text(content)
    watch = Watch(run, 1, "10s")
    assert [told(run, clock, 100.0, watch) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("causes", "factor"),
    [
        ([], 1),
        (["hang"], 2),
        (["hang", "hang"], 4),
        (["hang", "preempted"], 2),
        (["hang", "crashed", "hang"], 4),
        (["hang"] * 5, 8),
    ],
)
def test_each_attempt_after_a_hang_gets_twice_the_time(run: RunDir, causes: Sequence[str], factor: int) -> None:
    run.record("submitting", cluster="local", scheduler="local")
    for number, cause in enumerate(causes, start=1):
        run.record("started", attempt=number, job_id="7")
        run.record("interrupted", attempt=number, cause=cause)
    run.record("started", attempt=len(causes) + 1, job_id="7")
    watch = Watch.of(run, len(causes) + 1)
    assert (watch.setting, watch.limit(True, 0.1)) == ("auto", factor * LEAST_SECONDS)


@pytest.mark.parametrize(
    ("ends", "factor"),
    [
        ([("hang", 5), ("killed", 9)], 1),
        ([("hang", 5), ("hang", 9)], 2),
        ([("hang", 5), ("hang", 5)], 4),
        ([("hang", 5), ("killed", 3)], 2),
        ([("hang", 5 * number) for number in range(1, 9)], 2),
    ],
)
def test_a_hang_that_a_later_attempt_has_come_past_was_a_real_one(
    run: RunDir, ends: Sequence[tuple[str, int]], factor: int
) -> None:
    run.record("submitting", cluster="local", scheduler="local")
    for number, (cause, reached) in enumerate(ends, start=1):
        run.record("started", attempt=number, job_id="7")
        run.record("resumed", attempt=number, step=0)
        run.record("interrupted", attempt=number, cause=cause, reached=reached)
    run.record("started", attempt=len(ends) + 1, job_id="7")
    assert Watch.of(run, len(ends) + 1).limit(True, 0.1) == factor * LEAST_SECONDS


def test_a_long_evaluation_that_was_waited_for_once_is_waited_for_in_every_attempt(run: RunDir, clock: Clock) -> None:
    report(run, 9, slowest=1200.0)
    for attempt in (2, 3):  # the second has none
        run.logs(attempt).mkdir()
        reporter = RunReporter(run, attempt, is_main=True, on_lost_lease=lambda lost: None)
        reporter.heartbeat.begin()
        reporter.heartbeat.slowest = 1.0
        reporter._report({})
        reporter.close()
    watch = Watch(run, 3, "auto")
    assert watch.look() is None
    assert told(run, clock, 2 * 1200 - 1, watch) is None
    assert told(run, clock, 2.0, watch) is not None


def test_a_start_that_took_long_once_is_waited_for_in_every_attempt(run: RunDir, clock: Clock) -> None:
    run.record("submitting", cluster="local", scheduler="local")
    run.record("started", attempt=1, job_id="7", time=1000.0)
    run.record("resumed", attempt=1, step=0, time=1000.0)
    run.record("stepped", attempt=1, time=1000.0 + 2 * OUTSIDE_LOOP_SECONDS)
    run.record("interrupted", attempt=1, cause="preempted", reached=5)
    run.record("started", attempt=2, job_id="7")
    watch = Watch.of(run, 2)
    assert watch.limit(False, 0.0) == 4 * OUTSIDE_LOOP_SECONDS
    assert watch.limit(True, 0.1) == LEAST_SECONDS


# What a rank counts


class Beats:
    """A pulse and a clock for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("jobkit.worker.heartbeat.time", self.clock)
        self.pulse = Heartbeat()

    def after(self, *seconds: float) -> dict[str, Any]:
        for each in seconds:
            self.clock.now += each
            self.pulse.beat()
        return {name: self.pulse.report()[name] for name in ("beats", "training", "slowest")}


def test_the_first_step_is_not_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(monkeypatch)
    assert beats.after(50.0) == {"beats": 1, "training": False, "slowest": 0.0}
    beats.pulse.begin()
    assert beats.after(30.0)["slowest"] == 0.0
    assert beats.after(1.0, 3.0, 2.0) == {"beats": 5, "training": True, "slowest": 3.0}


def test_what_follows_the_loop_is_not_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(monkeypatch)
    beats.pulse.begin()
    beats.after(1.0, 2.0)
    beats.pulse.end()
    assert beats.after(99.0) == {"beats": 5, "training": False, "slowest": 2.0}


# What is done about it

RANK = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_hung_ranks_write_their_stacks_and_are_killed(run: RunDir, tmp_path: Path, stopped: bool) -> None:
    with (tmp_path / "rank.err").open("wb") as errors:
        rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=errors, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    if stopped:
        rank.send_signal(signal.SIGSTOP)
    sent = []

    def send(name: str) -> None:
        sent.append((name, time.monotonic()))
        os.kill(rank.pid, signal.Signals[f"SIG{name}"])

    end_hung(run, 1, "no progress", send)
    assert rank.wait(60) == -signal.SIGKILL
    rank.stdout.close()
    assert [name for name, _ in sent] == ["USR1", "CONT", "KILL"]
    assert "most recent call first" in (tmp_path / "rank.err").read_text()
    assert records.read(StopRequest, run.stop_request_file(1)) == StopRequest(cause="hang", error="no progress")
