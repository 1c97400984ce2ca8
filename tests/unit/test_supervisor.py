"""The supervisor's loop, with ranks and a job that do what a test says: whom it signals when, and when it leaves."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jobkit import slurm
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run import records
from jobkit.run.config import Config, Resources
from jobkit.run.events import Event
from jobkit.run.records import FailureReport, Progress, StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor import slurm_job
from jobkit.supervisor import supervisor as supervising
from jobkit.supervisor import time_limit as limits
from jobkit.supervisor.attempt import Begun, NotRunnable, begin, end, request_stop
from jobkit.supervisor.diagnosis import FirstFailure, Notice
from jobkit.supervisor.nodes import LaunchError
from jobkit.supervisor.parents import ParentError
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.slurm_job import EXIT_START_AGAIN, SlurmJob
from jobkit.supervisor.supervisor import KILL_AFTER_FAILURE_SECONDS, KILLED_SECONDS, Supervisor
from jobkit.supervisor.time_limit import LocalTimeLimit, SlurmTimeLimit

T = TypeVar("T")


class Clock:
    """A clock that only sleeping puts forward."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.at: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [action for when, action in self.at if when <= self.now]
        self.at = [one for one in self.at if one[0] > self.now]
        for action in due:
            action()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Let something happen so many seconds from now."""
        self.at.append((self.now + seconds, action))


class Ranks:
    """Ranks that run until they are told otherwise: `lives` seconds after TERM, not at all after KILL."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.running = False
        self.prepared: bool | ParentError = True
        self.started: list[int] = []
        self.sent: list[tuple[str, float]] = []
        self.first: FirstFailure | None = None
        self.notice: Notice | None = None
        self.lives = 1.0
        self.refusals = 0
        self.closed = self.ends = self.given_up = 0
        self.can_be_killed = True
        self.on_start: Callable[[], object] = lambda: None

    def prepare(self, begun: Begun) -> None:
        pass

    def are_prepared(self) -> bool:
        if isinstance(self.prepared, bool):
            return self.prepared
        raise self.prepared

    def start(self, begun: Begun) -> None:
        self.started.append(begun.number)
        self.running = True
        self.on_start()

    def are_running(self) -> bool:
        return self.running

    def signal(self, name: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SchedulerError("slurmctld is away")
        self.sent.append((name, round(self.clock.now - 1000.0, 2)))
        if name == "KILL" and self.can_be_killed:
            self.end()
        elif name == "TERM" and math.isfinite(self.lives):
            self.clock.after(self.lives, self.end)

    def end(self) -> None:
        self.running = False

    def first_failure(self) -> FirstFailure | None:
        return self.first

    def cause_of_death(self, job: object) -> FirstFailure | None:
        return self.first

    def all_returned(self) -> bool:
        return False

    def told(self) -> Notice | None:
        return self.notice

    def last_step(self) -> tuple[int, float] | None:
        return None

    def give_up(self) -> None:
        self.given_up += 1
        self.end()

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def close(self) -> None:
        self.closed += 1

    def learn(self) -> None:
        pass

    def can_start_again(self, without: Sequence[str]) -> bool:
        return True

    def shut_down(self) -> None:
        self.ends += 1


class Job:
    """A job that leaves after its first attempt, unless `attempts` says otherwise."""

    id = "7"
    scheduler = "local"

    def __init__(self, attempts: int = 1) -> None:
        self.attempts = attempts
        self.request: StopRequest | None = None
        self.no_time = False
        self.limit: Any = LocalTimeLimit(Config(name="toy", task="m:f").resources)
        self.left: list[tuple[str, bool]] = []

    def stop_request(self) -> StopRequest | None:
        return self.request

    def leaves_no_time(self) -> bool:
        return self.no_time

    def time_limit(self) -> Any:
        return self.limit

    def record(self) -> slurm.JobInfo | None:
        return None

    def was_away(self) -> bool:
        return False

    def look(self, action: Callable[[], None]) -> None:
        action()

    def until_mounted(self, action: Callable[[], T]) -> T:
        return action()

    def give_up(self, error: OSError) -> int:
        self.left.append((str(error), False))
        return EXIT_RESUMABLE

    def keeps_nodes(self, record: object) -> bool:
        return False

    def can_replace(self, record: object, nodes: Sequence[str]) -> bool:
        return True

    def leave(self, decision: Decision, *, now: bool) -> int | None:
        self.left.append((decision.reason, now))
        return EXIT_FINISHED if len(self.left) >= self.attempts else None


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
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    return run


def info(**known: Any) -> slurm.JobInfo:
    """Slurm's record of the job."""
    fields = {"state": "RUNNING", "reason": "", "preempt_time": None, "start": 0.0, "end": 100.0, "elapsed": 0.0}
    return slurm.JobInfo(**{"job_id": "7", "restarts": 0, "nodes": "node1", **fields, **known})


def causes(run: RunDir) -> list[str | None]:
    return [attempt.cause for attempt in run.status().attempts]


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
    job.limit = SlurmTimeLimit("7")
    progress = Progress(attempt=1, time=0.0, stopping=stopping)
    ranks.on_start = lambda: records.write(run.progress_file, progress)
    Supervisor(run, ranks, job).supervise()
    ((name, when),) = ranks.sent
    assert name == "KILL" and killed_at <= when <= killed_at + 2
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
    assert within(15, supervising.AttemptWatch(run, begun.number, ranks, job).until_end)


# A controller that is away


AWAY = SchedulerError(slurm.explain("scontrol", "Unable to contact slurm controller (connect failure)"))


class Controller:
    """Slurm's controller, away until a time of the clock."""

    def __init__(self, clock: Clock, until: float) -> None:
        self.clock = clock
        self.until = until
        self.asked: list[float] = []
        self.requeued_at: float | None = None

    def show_job(self, job_id: str, timeout: float = 30.0) -> slurm.JobInfo:
        self.asked.append(self.clock.now)
        if self.clock.now < self.until:
            raise AWAY
        return info(start=1000.0, end=2200.0, elapsed=self.clock.now - 1000.0)

    def requeue(self, job_id: str) -> bool:
        self.show_job(job_id)
        self.requeued_at = self.clock.now
        return True


@pytest.fixture
def away(run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Controller]:
    """Makes a controller that is away for so many seconds, for a job of 20 minutes that begins now."""
    monkeypatch.setattr(slurm_job, "time", clock)
    run.write_config(Config(name="toy", task="m:f", resources=Resources(time="20min")))

    def make(seconds: float) -> Controller:
        controller = Controller(clock, clock.now + seconds)
        monkeypatch.setattr(slurm, "show_job", controller.show_job)
        monkeypatch.setattr(slurm, "requeue", controller.requeue)
        return controller

    return make


def test_a_controller_that_is_away_for_minutes_is_asked_until_it_is_back(
    run: RunDir, away: Callable[[float], Controller]
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    controller = away(900.0)
    assert SlurmJob(run, "7").leave(Decision("requeue", "killed"), now=True) == EXIT_FINISHED
    assert controller.requeued_at is not None and controller.requeued_at < 1000 + 900 + 60
    assert Event.REQUEUE_FAILED not in [event["event"] for event in run.journal.read()]


def test_what_could_not_be_started_again_is_recorded_before_the_jobs_time_is_over(
    run: RunDir, clock: Clock, away: Callable[[float], Controller]
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    controller = away(math.inf)
    assert SlurmJob(run, "7").leave(Decision("requeue", "killed"), now=True) == EXIT_RESUMABLE
    assert 2200 - 60 - slurm_job.RECORD_SECONDS <= clock.now < 2200
    assert len(controller.asked) < 30
    status = run.status()
    assert status.state == State.INTERRUPTED and "contact slurm controller" in str(status.error)


def test_what_slurm_refuses_again_and_again_is_not_asked_for_until_the_time_limit(
    run: RunDir, clock: Clock, away: Callable[[float], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    away(0.0)

    def refuse(*arguments: object, **options: object) -> list[str]:
        raise SchedulerError("sbatch: error: Invalid account")

    monkeypatch.setattr(slurm, "jobs_with", refuse)
    assert SlurmJob(run, "7").leave(Decision("resubmit", "killed"), now=True) == EXIT_RESUMABLE
    assert clock.now < 1000 + 200


def test_a_run_directory_and_a_controller_that_are_both_away_are_not_given_up_at_once(
    run: RunDir, away: Callable[[float], Controller]
) -> None:
    controller = away(600.0)
    assert SlurmJob(run, "7").give_up(FileNotFoundError("gone")) == EXIT_FINISHED
    assert controller.requeued_at is not None


def test_a_rank_that_dies_while_slurm_does_not_answer_is_noticed(
    run: RunDir, clock: Clock, away: Callable[[float], Controller]
) -> None:
    begun = begin(run, job_id="7", scheduler="slurm")
    away(math.inf)
    ranks = Ranks(clock)
    ranks.running, ranks.first = True, FirstFailure(rank=1, signal=9)
    supervising.AttemptWatch(run, begun.number, ranks, SlurmJob(run, "7")).until_end()
    assert [name for name, _ in ranks.sent] == ["KILL"]


def test_ranks_that_srun_could_not_start_without_slurm_are_started_when_it_is_back(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.prepared = ParentError("srun ended with exit code 1")
    job.was_away = lambda: bool(setattr(ranks, "prepared", True)) or not ranks.started  # type: ignore[method-assign]
    ranks.on_start = lambda: clock.after(5, ranks.end)
    Supervisor(run, ranks, job).supervise()
    assert ranks.started == [1] and len(causes(run)) == 1


def test_a_node_that_srun_could_start_nothing_on_is_a_node_failure(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    lost = FirstFailure(node="node2", node_lost=True, error="Task launch failed on node node2")
    ranks.prepared = LaunchError("srun ended", lost)
    Supervisor(run, ranks, job).supervise()
    (attempt,) = run.status().attempts
    assert attempt.cause == "node_failure" and attempt.failure is not None
    assert (attempt.failure.node, attempt.failure.error) == ("node2", "Task launch failed on node node2")


def test_excluding_more_nodes_keeps_those_that_the_user_excludes(
    run: RunDir, away: Callable[[float], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    run.record(Event.EXCLUDED, node="node2")
    away(0.0)
    monkeypatch.setattr(slurm, "show_job", lambda *_: info(excluded="bad[1-2]", partition="low"))
    monkeypatch.setattr(slurm, "expand", lambda nodes: nodes.split(","))
    monkeypatch.setattr(slurm, "jobs_with", lambda script: ["7"])
    monkeypatch.setattr(slurm, "nodes_left", lambda partition, without: 9)
    asked: list[tuple[str, ...]] = []

    def take(script: str, *options: str, environment: object = None) -> str:
        asked.append(options)
        return "8"

    monkeypatch.setattr(slurm, "submit", take)
    monkeypatch.setattr(slurm, "could_start", take)
    job = SlurmJob(run, "7")
    assert job.can_replace(job.record(), ["node2", "node3"])
    job.leave(Decision("resubmit", "killed"), now=True)
    assert asked == [
        ("--exclude=bad[1-2],node2,node3",),
        ("--dependency=afterany:7", "--exclude=bad[1-2],node2"),
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_disk_that_refuses_writes_is_tried_three_times(
    run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(slurm_job, "time", clock)
    tried: list[float] = []

    def act() -> None:
        tried.append(clock.now - 1000)
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError):
        slurm_job.retry_until_mounted(run, act)
    assert tried == [0, 10, 30]


def test_a_file_server_that_is_away_is_waited_for_as_long_as_before(
    run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "time", clock)
    answers = iter([errno.ESTALE, errno.EIO, errno.ENOENT] * 30)

    def act() -> str:
        if number := next(answers, 0):
            raise OSError(number, os.strerror(number))
        return "done"

    assert slurm_job.retry_until_mounted(run, act) == "done"
    assert clock.now == 1090


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
        (USR2, FirstFailure(rank=0, code=1), LATE, "crashed"),
        (None, FirstFailure(rank=0, signal=TERM), EARLY, "signal"),
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
    run.submitit.mkdir(parents=True, exist_ok=True)
    run.batch_script.write_text(f"#!/bin/bash\n#SBATCH --signal=USR2@{delay}\n")
    begin(run, job_id="7", scheduler="slurm")
    end(run, 1, "7", job=LATE, all_returned=True, told=Notice(USR2, seconds))
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


# The end that a killed supervisor has left


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What Slurm is made to say: `job`, and `steps` that are still running until they are killed."""
    said: dict[str, Any] = {"job": None, "steps": ["7.0"]}
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: said["job"])
    monkeypatch.setattr(slurm, "steps", lambda job_id: list(said["steps"]))
    monkeypatch.setattr(slurm, "signal_steps", lambda job_id, name: said["steps"].clear())
    monkeypatch.setattr(slurm, "requeue", lambda job_id: said.setdefault("requeued", True))
    yield said


def test_the_end_of_a_killed_supervisor_kills_its_ranks_and_names_the_cause(run: RunDir, asked: dict[str, Any]) -> None:
    begin(run, job_id="7", scheduler="slurm")
    assert SlurmJob(run, "7").finish() == EXIT_FINISHED
    assert asked["requeued"] and not asked["steps"]
    attempt = run.status().attempts[0]
    assert (attempt.cause, attempt.failure and attempt.failure.error) == ("killed", "the supervisor was killed")


def test_a_rank_that_ends_its_attempt_for_a_dead_batch_script_kills_no_ranks(
    run: RunDir, asked: dict[str, Any]
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    asked["job"] = None  # Slurm's second SIGTERM hit the scontrol that was to tell
    assert SlurmJob(run, "7").finish(1) == EXIT_FINISHED
    assert asked["requeued"] and asked["steps"], "it would be killed with them, and nobody would requeue the job"


def test_where_slurm_is_away_the_end_of_a_killed_supervisor_waits_for_it(
    run: RunDir, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    answers = iter([False, False, False, True])  # the job's record, its steps, them again; then it is back

    def ask(*arguments: object, **options: object) -> Any:
        if not next(answers, True):
            raise SchedulerError("slurmctld is away")
        return None

    monkeypatch.setattr(slurm, "show_job", ask)
    monkeypatch.setattr(slurm, "steps", ask)
    assert SlurmJob(run, "7").finish() == EXIT_FINISHED
    assert asked["requeued"]


def test_an_end_that_somebody_has_recorded_is_carried_out_as_it_was_recorded(
    run: RunDir, asked: dict[str, Any]
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    request_stop(run, 1, StopRequest(cause="preempted"))
    run.record(Event.INTERRUPTED, attempt=1, cause="preempted", step=5)
    asked["steps"] = []
    assert SlurmJob(run, "7").finish(1) == EXIT_FINISHED
    assert asked["requeued"] and causes(run) == ["preempted"]


@pytest.mark.parametrize("job_id", ["7", "8"])
def test_a_job_ends_no_attempt_but_its_own(run: RunDir, asked: dict[str, Any], job_id: str) -> None:
    if job_id == "8":
        begin(run, job_id="7", scheduler="slurm")
    with pytest.raises(LookupError):
        SlurmJob(run, job_id).finish()
    assert "requeued" not in asked and asked["steps"]


def test_a_decision_to_start_again_is_left_to_the_end_after_the_teardown(run: RunDir, asked: dict[str, Any]) -> None:
    begin(run, job_id="7", scheduler="slurm")
    job = SlurmJob(run, "7")
    assert job.leave(Decision("requeue", "killed"), now=False) == EXIT_START_AGAIN
    assert "requeued" not in asked
    assert job.leave(Decision("requeue", "killed"), now=True) == EXIT_FINISHED
    assert asked["requeued"]
