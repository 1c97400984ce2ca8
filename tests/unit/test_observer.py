"""A run seen from outside: what was seen of one job, or attempt, is not said of the next one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.supervised import info

from jobkit import slurm
from jobkit.cli.main import main
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.submission import cancel, job, observer

HERE = "b@b:1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """One that trains in job 15, as far as the journal says."""
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f"))
    run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster=HERE)
    run.record(Event.SUBMITTED, job_id="15")
    run.record(Event.STARTED, attempt=1, job_id="15")
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "cluster", lambda timeout=30.0: HERE)
    return run


def successor_begins(run: RunDir) -> None:
    run.record(Event.INTERRUPTED, attempt=1, cause="preempted")
    run.record(Event.REQUEUED, job_id="16", predecessor="15")
    run.record(Event.STARTED, attempt=2, job_id="16")


def ended(job_id: str) -> slurm.JobInfo:
    return info(job_id=job_id, state="COMPLETED")


def test_the_end_of_a_job_is_not_that_of_the_one_that_has_succeeded_it_meanwhile(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(job_id: str, timeout: float = 30.0) -> slurm.JobInfo:
        successor_begins(run)
        return ended(job_id)

    monkeypatch.setattr(slurm, "show_job", slow)
    before = len(run.journal.read())
    with run.submission_lock():
        status = job.settle(run)
    assert (status.state, status.probably, status.job_id) == (State.RUNNING, None, "16")
    assert len(run.journal.read()) == before + 3


def test_a_job_that_begins_after_the_look_keeps_its_predecessors_end_from_being_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observer.observe

    def then_it_begins(run: RunDir, find_job: observer.FindJob) -> object:
        status = seen(run, find_job)
        successor_begins(run)
        return status

    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: ended(job_id))
    monkeypatch.setattr(job, "observe", then_it_begins)
    with run.submission_lock():
        assert job.settle(run).state == State.RUNNING
    assert run.status().attempts[1].ended is None


def test_a_list_says_nothing_of_the_next_job_by_the_end_of_the_last(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.status()
    successor_begins(run)
    monkeypatch.setattr(slurm, "jobs_of", lambda users, timeout: [ended("15")])
    (status,) = observer.observe_all([(run, before)])
    assert (status.state, status.probably) == (State.RUNNING, None)


def test_an_attempt_that_begins_while_a_cancel_looks_at_the_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "local-12345678")
    run.logs(1).mkdir(parents=True)
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.SUBMITTED, job_id="7")
    settle = job.settle

    def then_it_begins(run: RunDir, find_job: object) -> object:
        status = settle(run)
        if not status.attempts:
            run.record(Event.STARTED, attempt=1, job_id="7")
        return status

    monkeypatch.setattr(cancel, "settle", then_it_begins)
    with run.alive_lock():
        cancel.cancel(run, on_wait=lambda: run.record(Event.INTERRUPTED, attempt=1, cause="cancelled"))
    request = run.stop_request(1)
    assert request is not None and request.cause == "cancelled"


# Between two attempts of a job


def said_by_status(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("JOBKIT_RUNS", str(run.path.parent))
    assert main(["status", run.name]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "reason", "says", "not_said"),
    [
        ("PENDING", "BeginTime", ["queued", "(job 15 on", "in the queue again: it continues by itself"], "continue it"),
        ("COMPLETING", "None", ["queued", "in the queue again: it continues by itself"], "continue it"),
        ("PENDING", "JobHeldUser", ["held", "scontrol release 15"], "by itself"),
        ("RUNNING", "None", ["interrupted", "job 15 is ending: in some seconds"], "continue it"),
        ("PREEMPTED", "None", ["interrupted", "to continue it: python -m jobkit.submit toy.yaml"], "by itself"),
    ],
)
def test_nothing_is_to_be_typed_where_slurm_has_the_job_in_the_queue_again(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    reason: str,
    says: list[str],
    not_said: str,
) -> None:
    run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster=HERE, command="python -m jobkit.submit toy.yaml")
    run.record(Event.STARTED, attempt=1, job_id="15")
    run.record(Event.INTERRUPTED, attempt=1, cause="preempted", step=7)
    seen = info(job_id="15", state=state, reason=reason, end=None)
    monkeypatch.setattr(slurm, "show_job", lambda job_id, timeout=30.0: seen)
    said = said_by_status(run, monkeypatch, capsys)
    assert all(text in said for text in says) and not_said not in said, said
    assert run.status().state == State.INTERRUPTED, "nothing is written"


# A submission that was cut off


def killed_before_its_end(run: RunDir) -> None:
    """Make a submission whose process is killed while it holds the lock."""
    run.record(Event.CANCELLED, attempt=1)
    child = os.fork()
    if not child:
        run.submission_lock().__enter__()
        run.record(Event.SUBMITTING, scheduler="slurm", slurm_cluster=HERE)
        os._exit(0)
    os.waitpid(child, 0)


def looks(run: RunDir) -> list[object]:
    status = observer.observe(run)
    return [status.state, status.probably, observer.is_active(run, status)]


def test_a_submission_that_nobody_makes_any_more_is_not_called_queued(run: RunDir) -> None:
    killed_before_its_end(run)
    files = sorted(run.path.parent.rglob("*"))
    watch = observer.Observer(run)
    assert looks(run) == [State.CANCELLED, "lost", False]
    assert "cut off" in str(watch.look().error) and watch.is_over
    assert observer.observe_all([(run, run.status())])[0].probably == "lost"
    assert run.status().submitting and sorted(run.path.parent.rglob("*")) == files, "nothing is written"


def test_a_submission_that_is_being_made_is_queued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_its_end(run)
    with run.submission_lock():
        assert looks(run) == [State.QUEUED, None, True]
    is_free: Callable[[], bool | None] = run.is_being_submitted

    def then_it_is_done() -> bool | None:
        run.record(Event.SUBMITTED, job_id="17")
        return is_free()

    monkeypatch.setattr(run, "is_being_submitted", then_it_is_done)
    assert looks(run) == [State.QUEUED, None, True]


def test_a_script_that_begins_holds_no_lock_of_submissions_and_is_not_lost(run: RunDir) -> None:
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")  # as jobkit.init does
    with run.alive_lock():
        assert observer.observe(run).probably is None
    assert observer.observe(run).probably == "lost"
