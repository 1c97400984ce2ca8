"""The beginning and the end of an attempt: which job may begin one, and how the end of a command is read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
from harness.supervised import causes, info

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE
from jobkit.run import snapshot
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor.attempt import NotRunnable, begin, end
from jobkit.supervisor.diagnosis import FirstFailure, Notice

T = TypeVar("T")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f"))
    run.record(Event.SUBMITTING)
    return run


# Jobs that start late


@pytest.mark.parametrize(
    ("here", "submitted", "other", "runs"),
    [
        ("b@b:1", "8", None, True),
        ("a@a:1", "8", None, False),  # the newest submission was made to another cluster
        ("b@c:1", "8", None, False),
        ("a@a:1", "7", None, False),  # and its job there has the same id
        ("b@c:1", "7", None, True),  # the controller has moved
        ("a@a:1", None, None, False),  # a submission there is just being made
        ("b@b:1", "8", info(job_id="8"), False),
        ("b@b:1", "8", info(job_id="8", state="COMPLETED"), True),
        ("b@b:1", "8", info(job_id="8", script="/elsewhere"), True),
    ],
)
def test_only_the_job_that_was_submitted_last_runs_it(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    submitted: str | None,
    other: slurm.JobInfo | None,
    runs: bool,
) -> None:
    run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster="b@b:1")
    if submitted is not None:
        run.record(Event.SUBMITTED, job_id=submitted)
    monkeypatch.setattr(slurm, "cluster", lambda: here)
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: other)
    if runs:
        assert begin(run, job_id="7", scheduler="slurm").number == 1
    else:
        with pytest.raises(NotRunnable):
            begin(run, job_id="7", scheduler="slurm")


@pytest.mark.parametrize("end", [Event.FAILED, Event.INTERRUPTED])
@pytest.mark.parametrize(
    ("here", "job", "runs"),
    [
        ("b@b:1", "8", True),  # the job that was submitted: started again by Slurm or by hand
        ("a@a:1", "8", False),
        ("a@a:1", "7", False),
        ("b@b:1", "7", None),
    ],
)
def test_a_run_that_has_ended_is_not_revived_by_a_job_of_an_earlier_submission(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, end: Event, here: str, job: str, runs: bool | None
) -> None:
    run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster="a@a:1")
    run.record(Event.SUBMITTED, job_id="7")
    run.record(Event.CANCELLED)  # from the other cluster, which cannot end the job
    run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster="b@b:1")
    run.record(Event.STARTED, attempt=1, job_id="8")
    run.record(end, attempt=1, cause="crashed")
    monkeypatch.setattr(slurm, "cluster", lambda: here)
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: info(job_id=job_id, state="FAILED"))
    # A job that follows an interrupted one may not be journalled: the disk was away.
    if runs or (runs is None and end == Event.INTERRUPTED):
        assert begin(run, job_id=job, scheduler="slurm").number == 2
    else:
        with pytest.raises(NotRunnable):
            begin(run, job_id=job, scheduler="slurm")


def test_a_job_does_not_take_a_run_that_goes_on_on_a_workstation(run: RunDir) -> None:
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.STARTED, attempt=1, job_id="4711")
    with pytest.raises(NotRunnable, match="local"):
        begin(run, job_id="7", scheduler="slurm")
    assert run.status().state == State.RUNNING


@pytest.mark.parametrize(("grace", "least"), [(600.0, 590.0), (0.0, 0.0)])
def test_a_cancel_while_an_attempt_begins_is_found_by_that_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, grace: float, least: float
) -> None:
    run.record(Event.SUBMITTING, code="c0de")
    monkeypatch.setattr(snapshot, "verify", lambda *_: run.record(Event.CANCEL_REQUESTED, grace=grace) or [])
    begin(run, job_id="7", scheduler="slurm")
    request = run.stop_request(1)
    assert request is not None and request.grace is not None
    assert request.cause == "cancelled" and least <= request.grace <= grace


def test_a_run_that_was_cancelled_between_two_attempts_is_cancelled(run: RunDir) -> None:
    run.record(Event.CANCEL_REQUESTED, grace=600.0)
    with pytest.raises(NotRunnable):
        begin(run, job_id="7", scheduler="slurm")
    assert run.status().state == State.CANCELLED


# What a command that reports nothing was told

USR2, TERM = 12, 15
EARLY, LATE = info(end=400.0, elapsed=77.0), info(end=400.0, elapsed=300.0)


@pytest.mark.parametrize(
    ("told", "first", "job", "cause"),
    [
        (None, None, LATE, "finished"),
        (USR2, None, LATE, "timeout"),
        (USR2, None, EARLY, "signal"),
        (TERM, None, EARLY, "signal"),
        (TERM, None, info(preempt_time=1.0), "preempted"),
        (USR2, None, None, "signal"),
        (USR2, FirstFailure(rank=0, code=128 + USR2), LATE, "timeout"),
        (TERM, FirstFailure(rank=0, code=128 + TERM), EARLY, "signal"),
        (None, FirstFailure(rank=0, code=128 + TERM), EARLY, "crashed"),
        (USR2, FirstFailure(rank=0, code=1), LATE, "timeout"),  # of a shell whose program died of it
        (TERM, FirstFailure(rank=0, code=1), EARLY, "signal"),
        (None, FirstFailure(rank=0, code=1), LATE, "crashed"),
        (TERM, FirstFailure(rank=0, signal=TERM), EARLY, "signal"),
        (None, FirstFailure(rank=0, signal=TERM), EARLY, "killed"),  # nobody told it to stop
        (None, FirstFailure(rank=0, signal=TERM), info(preempt_time=1.0), "preempted"),
        (USR2, FirstFailure(rank=0, signal=9), LATE, "killed"),
    ],
)
def test_the_end_of_a_silent_command_is_read_by_what_it_was_told(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    told: int | None,
    first: FirstFailure | None,
    job: slurm.JobInfo | None,
    cause: str,
) -> None:
    run.write_config(Config(name="toy", command=["train"]))
    begin(run, job_id="7", scheduler="slurm")
    end(run, 1, "7", first=first, job=job, all_returned=first is None, told=told and Notice(told, 30.0))
    assert causes(run) == [cause]


@pytest.mark.parametrize(
    ("seconds", "delay", "cause"), [(150.0, 90, "timeout"), (160.0, 90, "finished"), (160.0, 600, "timeout")]
)
def test_a_notice_that_a_silent_command_has_survived_was_not_its_end(
    run: RunDir, seconds: float, delay: int, cause: str
) -> None:
    run.write_config(Config(name="toy", command=["train"]))
    submitted_with(run, delay)
    begin(run, job_id="7", scheduler="slurm")
    end(run, 1, "7", job=LATE, all_returned=True, told=Notice(USR2, seconds))
    assert causes(run) == [cause]


def submitted_with(run: RunDir, delay: int) -> None:
    run.write_config(Config(name="toy", command=["train"], clusters={"slurm": {"signal-delay-s": delay}}))
    run.record(Event.SUBMITTING, cluster="slurm", scheduler="slurm")


@pytest.mark.parametrize(("remaining", "cause"), [(210.0, "timeout"), (400.0, "signal")])
def test_a_notice_as_early_as_the_cluster_gives_it_is_the_time_limit(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, remaining: float, cause: str
) -> None:
    submitted_with(run, 180)
    begin(run, job_id="7", scheduler="slurm")
    job = info(end=1000.0, elapsed=1000.0 - remaining)
    end(run, 1, "7", job=job, all_returned=True, told=Notice(USR2, 30.0))
    assert causes(run) == [cause]


def test_exit_code_75_of_a_silent_command_is_not_taken_for_a_full_disk(run: RunDir) -> None:
    run.write_config(Config(name="toy", command=["train"]))
    begin(run, job_id="7", scheduler="local")
    end(run, 1, "7", first=FirstFailure(rank=0, code=EXIT_RESUMABLE))
    assert causes(run) == ["crashed"]


def test_a_command_that_reports_its_steps_says_itself_what_it_was_told(run: RunDir) -> None:
    run.write_config(Config(name="toy", command=["train"]))
    begin(run, job_id="7", scheduler="slurm")
    run.record(Event.RESUMED, attempt=1, step=0)
    end(run, 1, "7", job=EARLY, all_returned=True, told=Notice(USR2, 30.0))
    assert causes(run) == ["finished"]
