"""The supervisor's loop, with ranks and a job that do what a test says: whom it signals when, and when it leaves."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from harness.supervised import Clock, Job, Ranks, causes, info

from jobkit import slurm
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.records import FailureReport, Progress, StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor import supervisor as supervising
from jobkit.supervisor import time_limit as limits
from jobkit.supervisor.attempt import begin
from jobkit.supervisor.diagnosis import FirstFailure
from jobkit.supervisor.notifier import Notifier
from jobkit.supervisor.parents import ParentError
from jobkit.supervisor.presence import Presence
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.slurm_job import SlurmJob
from jobkit.supervisor.supervisor import KILL_AFTER_FAILURE_SECONDS, KILLED_SECONDS, Supervisor
from jobkit.supervisor.time_limit import LocalTimeLimit, SlurmTimeLimit

T = TypeVar("T")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervising, "time", clock)
    monkeypatch.setattr(limits, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f"))
    run.record(Event.SUBMITTING)
    return run


def test_a_stop_that_comes_before_the_first_attempt_begins_none(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    job.request = StopRequest(cause="user")
    assert Supervisor(run, ranks, job).supervise() == EXIT_RESUMABLE
    assert ranks.started == []
    assert run.status().state == State.INTERRUPTED


def test_a_stop_ends_an_attempt_whose_ranks_cannot_be_started_yet(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.prepared = False  # an import that hangs
    clock.after(5, lambda: setattr(job, "request", StopRequest(cause="user")))
    Supervisor(run, ranks, job).supervise()
    assert (ranks.started, ranks.closed, causes(run)) == ([], 1, ["user"])


def test_ranks_that_cannot_be_started_are_a_crash_that_says_why(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job(attempts=2)
    ranks.prepared = ParentError("no torch")
    Supervisor(run, ranks, job).supervise()
    assert (ranks.started, causes(run)) == ([], ["crashed"] * 2)
    failure = run.status().attempts[0].failure
    assert failure is not None and failure.error == f"no torch ({run.supervisor_log})"


@pytest.mark.parametrize(
    ("first", "reports", "at_once"),
    [
        (FirstFailure(rank=1, signal=9), [], True),
        (FirstFailure(node="node2", node_lost=True), [], True),
        (FirstFailure(rank=1, code=1), [(1, "ValueError: a bad sample")], True),
        (FirstFailure(rank=1, code=1), [(1, "RuntimeError: Connection closed by peer")], False),
        (FirstFailure(rank=1, code=7), [], False),
    ],
)
def test_the_ranks_beside_a_dead_one_are_killed_when_it_is_known_what_it_died_of(
    run: RunDir, clock: Clock, first: FirstFailure, reports: list[tuple[int, str]], at_once: bool
) -> None:
    ranks = Ranks(clock)

    def die() -> None:
        for rank, error in reports:
            records.write(run.error_file(1, rank), FailureReport(time=0.0, rank=rank, error=error))
        ranks.first = first

    ranks.on_start = die
    Supervisor(run, ranks, Job()).supervise()
    ((name, when),) = ranks.sent
    assert name == "KILL"
    assert when == 0 if at_once else KILL_AFTER_FAILURE_SECONDS < when < KILL_AFTER_FAILURE_SECONDS + 1


def test_the_next_attempt_is_the_next_turn_of_the_loop(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job(attempts=3)
    ranks.on_start = lambda: setattr(ranks, "first", FirstFailure(rank=1, signal=9))
    assert Supervisor(run, ranks, job).supervise() == EXIT_FINISHED
    assert ranks.started == [1, 2, 3] and ranks.closed == 3
    assert causes(run) == ["killed"] * 3


@pytest.mark.parametrize(
    ("requests", "sent"),
    [
        ([None], [("TERM", 0)]),
        ([None, None], [("TERM", 0)]),
        ([0], [("KILL", 0)]),
        ([None, 0], [("TERM", 0), ("KILL", 5)]),
        ([5.0], [("TERM", 0), ("KILL", 5)]),
        ([600.0], [("TERM", 0)]),
    ],
)
def test_a_stop_request_is_obeyed_once_and_its_grace_is_kept(
    run: RunDir, clock: Clock, requests: Sequence[float | None], sent: Sequence[tuple[str, int]]
) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.lives = 8.0

    def ask() -> None:
        for number, grace in enumerate(requests):
            request = StopRequest(cause="preempted", grace=grace)
            clock.after(5.0 * number, lambda r=request: records.write(run.stop_request_file(1), r))

    ranks.on_start = ask
    Supervisor(run, ranks, job).supervise()
    assert [(name, when // 5 * 5) for name, when in ranks.sent] == sent
    assert causes(run) == ["preempted"]


def test_a_signal_to_the_supervisor_stops_its_ranks_and_a_second_one_kills_them(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.lives = math.inf
    ranks.on_start = lambda: [
        clock.after(1, lambda: setattr(job, "request", StopRequest(cause="user"))),
        clock.after(60, lambda: setattr(job, "request", StopRequest(cause="user", grace=0))),
    ]
    Supervisor(run, ranks, job).supervise()
    assert [name for name, _ in ranks.sent] == ["TERM", "KILL"]
    assert causes(run) == ["user"]
    request = run.stop_request(1)
    assert request is not None and request.cause == "user"


def test_the_time_limit_of_this_machine_leaves_a_margin_for_the_last_checkpoint(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.lives = math.inf
    job.limit = LocalTimeLimit(Config(name="toy", task="m:f").resources.__class__(time="100s"))
    Supervisor(run, ranks, job).supervise()
    assert [(name, when // 1) for name, when in ranks.sent] == [("TERM", 80), ("KILL", 100)]
    assert causes(run) == ["timeout"]


def test_what_the_ranks_take_to_start_counts_against_the_time_limit(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.lives = math.inf
    resources = Config(name="toy", task="m:f").resources.__class__(time="100s")
    job.time_limit = lambda: LocalTimeLimit(resources)  # type: ignore[method-assign]
    ranks.on_start = lambda: clock.sleep(30)
    Supervisor(run, ranks, job).supervise()
    assert [(name, when // 1) for name, when in ranks.sent] == [("TERM", 80), ("KILL", 100)]


@pytest.mark.parametrize(("stopping", "killed_at"), [(False, 94), (True, 98)])
def test_under_slurm_the_supervisor_keeps_a_part_of_the_margin_to_decide_in(
    run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch, stopping: bool, killed_at: int
) -> None:
    elapsed = iter([0.0, 60.25, 120.5])
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: info(elapsed=next(elapsed)))
    monkeypatch.setattr(slurm, "stop_margin", lambda limit: 12.0)
    ranks, job = Ranks(clock), Job()
    job.limit = SlurmTimeLimit(run, "7")
    progress = Progress(attempt=1, time=0.0, stopping=stopping)
    ranks.on_start = lambda: records.write(run.progress_file, progress)
    Supervisor(run, ranks, job).supervise()
    ((name, when),) = ranks.sent
    assert name == "KILL" and killed_at <= when <= killed_at + 2
    assert causes(run) == ["timeout"]


def test_a_command_that_reports_nothing_is_told_of_the_limit_and_may_run_until_shortly_before_it(
    run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_config(Config(name="toy", command=["train"]))
    elapsed = iter([0.0, 60.25, 120.5])
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: info(elapsed=next(elapsed)))
    monkeypatch.setattr(slurm, "stop_margin", lambda limit: 12.0)
    ranks, job = Ranks(clock), Job()
    job.limit = SlurmTimeLimit(run, "7")
    Supervisor(run, ranks, job).supervise()
    (notice, told_at), (end, killed_at) = ranks.sent
    assert (notice, end) == ("USR2", "KILL") and 88 <= told_at < 90 and 98 <= killed_at < 100
    assert causes(run) == ["timeout"]


def test_where_slurm_leaves_no_time_it_is_decided_while_the_ranks_are_still_saving(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.on_start = lambda: clock.after(2, lambda: setattr(job, "no_time", True) or clock.after(3, ranks.end))
    request_stop_at_once: list[bool] = []
    leave = job.leave

    def watched(decision: Decision, *, now: bool) -> int | None:
        request_stop_at_once.append(ranks.are_running())
        return leave(decision, now=now)

    job.leave = watched  # type: ignore[method-assign]
    Supervisor(run, ranks, job).supervise()
    assert request_stop_at_once == [True]
    assert job.left[0][1] is True and ranks.sent == [] and not ranks.running


def test_where_slurm_leaves_no_time_while_the_parents_import_it_is_decided_at_once(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.prepared = False
    clock.after(2, lambda: setattr(job, "no_time", True))
    Supervisor(run, ranks, job).supervise()
    assert [now for _, now in job.left] == [True] and not ranks.started


def test_where_slurm_leaves_no_time_a_pause_ends(run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, job = Ranks(clock), Job(attempts=2)
    supervisor = Supervisor(run, ranks, job)
    clock.after(2, lambda: setattr(job, "no_time", True))
    started = clock.now
    supervisor._pause(60.0)
    assert clock.now - started < 5


def test_killed_ranks_that_do_not_end_are_given_up(run: RunDir, clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.can_be_killed = False
    ranks.on_start = lambda: setattr(ranks, "first", FirstFailure(rank=1, signal=9))
    started = clock.now
    Supervisor(run, ranks, Job()).supervise()
    assert ranks.given_up == 1 and KILLED_SECONDS <= clock.now - started < KILLED_SECONDS + 5


def test_a_slurm_that_is_away_is_asked_again(run: RunDir, clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.refusals = 3
    ranks.on_start = lambda: setattr(ranks, "first", FirstFailure(rank=1, signal=9))
    Supervisor(run, ranks, Job()).supervise()
    assert [name for name, _ in ranks.sent] == ["KILL"]


def test_where_the_run_directory_is_away_the_job_decides(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()

    def fail(action: Callable[[], T]) -> T:
        raise OSError("gone")

    job.until_mounted = fail  # type: ignore[method-assign]
    assert Supervisor(run, ranks, job).supervise() == EXIT_RESUMABLE
    assert job.left == [("gone", False)]


def test_a_run_directory_that_is_away_for_a_moment_when_the_ranks_have_started_does_not_end_them(
    run: RunDir, clock: Clock
) -> None:
    ranks, job = Ranks(clock), Job()
    away = run.path.with_name("away")

    def move() -> None:
        run.path.rename(away)
        clock.after(5, lambda: away.rename(run.path))
        clock.after(20, ranks.end)

    ranks.on_start = move
    Supervisor(run, ranks, job).supervise()
    assert clock.now >= 1020 and ranks.sent == []
    assert [now for _, now in job.left] == [False] and len(causes(run)) == 1


class Unanswering:
    """A file of a file server that does not answer: whoever reads it waits, until the test is over."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        os.mkfifo(file)

    def answer(self) -> None:
        """Let those who wait find the file empty."""
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(self.file, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture
def mute(run: RunDir) -> Iterator[Callable[[Path], Unanswering]]:
    made: list[Unanswering] = []

    def make(file: Path) -> Unanswering:
        made.append(Unanswering(file))
        return made[-1]

    yield make
    for one in made:
        one.answer()


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether an action ends in time."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.mark.parametrize("ends", ["the ranks have ended", "Slurm ends the job"])
def test_a_file_server_that_does_not_answer_keeps_the_supervisor_from_nothing_but_looking(
    run: RunDir, mute: Callable[[Path], Unanswering], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    begun = begin(run, job_id="7", scheduler="slurm")
    ended, at = info(state="COMPLETING", reason="TimeLimit"), time.monotonic() + 2
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: ended if time.monotonic() > at else info())
    mute(run.stop_request_file(begun.number))
    ranks, job = Ranks(Clock()), SlurmJob(run, "7")
    ranks.wait = time.sleep  # type: ignore[method-assign]
    ranks.running = True
    act = ranks.end if ends == "the ranks have ended" else lambda: job._on_signal(15, None)
    timer = threading.Timer(3, act)
    timer.start()
    assert within(15, supervising.AttemptWatch(run, begun.number, ranks, job, Notifier(run), Presence(run)).until_end)
