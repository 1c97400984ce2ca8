"""The Slurm job around a supervisor: a controller that is away, a disk that refuses, an end that was left undone."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from harness.supervised import Clock, Job, Ranks, causes, info

from jobkit import slurm
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run.config import Config, Resources
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor import slurm_job
from jobkit.supervisor import supervisor as supervising
from jobkit.supervisor import time_limit as limits
from jobkit.supervisor.attempt import begin, request_stop
from jobkit.supervisor.batch_script import EXIT_START_AGAIN
from jobkit.supervisor.diagnosis import FirstFailure
from jobkit.supervisor.nodes import LaunchError
from jobkit.supervisor.notifier import Notifier
from jobkit.supervisor.parents import ParentError
from jobkit.supervisor.presence import Presence
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.slurm_job import SlurmJob
from jobkit.supervisor.supervisor import Supervisor

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
    supervising.AttemptWatch(run, begun.number, ranks, SlurmJob(run, "7"), Notifier(run), Presence(run)).until_end()
    assert [name for name, _ in ranks.sent] == ["KILL"]


def test_ranks_that_srun_could_not_start_without_slurm_are_started_when_it_is_back(run: RunDir, clock: Clock) -> None:
    ranks, job = Ranks(clock), Job()
    ranks.prepared = ParentError("srun ended with exit code 1")
    job.waited_for_scheduler = lambda: bool(setattr(ranks, "prepared", True)) or not ranks.started  # type: ignore[method-assign]
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
    monkeypatch.setattr(slurm, "jobs_with", lambda script, task: ["7"])
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
        ("--exclude=bad[1-2],node2",),
        ("--dependency=afterany:7", "--exclude=bad[1-2],node2"),
    ]


def test_a_job_that_follows_excludes_nothing_where_too_few_nodes_would_be_left(
    run: RunDir, away: Callable[[float], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, job_id="7", scheduler="slurm")
    run.record(Event.EXCLUDED, node="node2")
    away(0.0)
    monkeypatch.setattr(slurm, "show_job", lambda *_: info(excluded="bad1", partition="low"))
    monkeypatch.setattr(slurm, "expand", lambda nodes: nodes.split(","))
    monkeypatch.setattr(slurm, "jobs_with", lambda script, task: ["7"])
    monkeypatch.setattr(slurm, "nodes_left", lambda partition, without: 0)
    asked: list[tuple[str, ...]] = []

    def take(script: str, *options: str, environment: object = None) -> str:
        asked.append(options)
        return "8"

    monkeypatch.setattr(slurm, "submit", take)
    SlurmJob(run, "7").leave(Decision("resubmit", "killed"), now=True)
    assert asked == [("--dependency=afterany:7",)]  # the user's own are in the batch script


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


def test_the_end_of_a_killed_supervisor_kills_its_ranks_and_names_the_cause(
    run: RunDir, clock: Clock, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "time", clock)  # it gives them time to save first
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
