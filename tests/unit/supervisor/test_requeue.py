"""How a Slurm job gets into the queue again: what Slurm is told, and what the journal says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobkit.config.schema import Config, Resources
from jobkit.errors import SchedulerError, SchedulerMissing, SchedulerTimeout
from jobkit.run.journal import Journal
from jobkit.run.records import AttemptEnded, Submitted
from jobkit.run.rundir import RunDir
from jobkit.slurm.jobs import Job
from jobkit.supervisor import requeue
from jobkit.supervisor.lease import ThisJob
from jobkit.supervisor.retry import Decision

NOW = 1000.0
JOB = Job("7", "RUNNING", "None", NOW - 100, NOW + 900, "n1,n2,n3", "low", "jobkit:toy:1:abc")
PREEMPTED = replace(JOB, state="COMPLETING", end=NOW, preempt_time=NOW)
CANCELLED = replace(JOB, state="COMPLETING", end=NOW)
ALL = {"n1", "n2", "n3", "n4", "n5"}


class Slurm:
    """What Slurm is told, and its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job: Job | None = JOB
        self.said: list[str] = []
        self.usable = ALL
        self.errors: dict[str, list[SchedulerError]] = {}
        self.queue: list[Job] = []
        self.environment: dict[str, str] = {}
        monkeypatch.setattr(requeue.jobs, "show", lambda job_id: self.answer("show", self.job))
        monkeypatch.setattr(requeue.jobs, "controller_time", lambda: NOW)
        monkeypatch.setattr(requeue.jobs, "requeue", lambda *a: self.answer("requeue", True, journals=True))
        monkeypatch.setattr(requeue.jobs, "exclude_nodes", lambda job_id, names: self.said.append(f"exclude {names}"))
        monkeypatch.setattr(requeue.jobs, "begin_later", lambda job_id, s: self.said.append(f"begin in {s:g} s"))
        monkeypatch.setattr(requeue.jobs, "cancel", lambda job_id: self.said.append(f"scancel {job_id}"))
        monkeypatch.setattr(requeue.jobs, "queue", lambda: self.queue)
        monkeypatch.setattr(requeue.nodes, "usable_nodes", lambda partition: self.usable)
        monkeypatch.setattr(requeue.nodes, "expand", lambda names: [name for name in names.split(",") if name])
        monkeypatch.setattr(requeue.commands, "run", lambda *a, **k: self.answer("test-only", ""))
        monkeypatch.setattr(requeue.commands, "submit", self._submit)
        monkeypatch.setattr(requeue.time, "sleep", lambda seconds: None)

    def answer(self, name: str, value: Any, journals: bool = False) -> Any:
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        if journals:
            self.said.append(name)
        return value

    def _submit(self, script: str, *options: str, **other: Any) -> str:
        self.answer("submit", None)
        self.said.append("sbatch " + " ".join(option for option in options if not option.startswith("--comment")))
        self.environment = other["environment"]
        return "8"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    run = RunDir(tmp_path / "runs" / "toy")
    run.path.mkdir(parents=True)
    journal = Journal(run)
    journal.append(Submitted(token="jobkit:toy:1:abc", number=1, scheduler="slurm"))
    return journal


def start_again(journal: Journal, action: str, lost: tuple[str, ...] = (), later: float = 0.0) -> None:
    config = Config(name="toy", task="t:f", resources=Resources(nodes=2, spares=1))
    this_job = ThisJob(job_id="7", token="jobkit:toy:1:abc", job=JOB)
    decision = Decision(action=action, reason="", pause=later)  # type: ignore[arg-type]
    requeue.start_again(this_job, journal, config, decision, lost)


def test_the_same_job_again(slurm: Slurm, journal: Journal) -> None:
    start_again(journal, "requeue")
    assert slurm.said == ["requeue"]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("requeue", ["requeue", "begin in 290 s"]),
        ("successor", ["sbatch --dependency=afterany:7 --begin=now+290"]),
    ],
)
def test_the_rest_of_a_pause_is_waited_for_in_the_queue(
    slurm: Slurm, journal: Journal, action: str, said: list[str]
) -> None:
    start_again(journal, action, later=290.0)
    assert slurm.said == said


def test_a_controller_that_is_away_is_waited_for(slurm: Slurm, journal: Journal) -> None:
    slurm.errors = {"show": [SchedulerTimeout("")] * 9, "requeue": [SchedulerTimeout("")]}
    start_again(journal, "requeue")
    assert slurm.said == ["requeue"]


@pytest.mark.parametrize("action", ["requeue", "successor"])
def test_a_scancel_is_not_undone(slurm: Slurm, journal: Journal, action: str) -> None:
    slurm.job = CANCELLED
    start_again(journal, action)
    assert (slurm.said, journal.status.state) == ([], "cancelled")


def test_a_scancel_just_after_the_requeue_is_journalled(
    slurm: Slurm, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue.time, "sleep", lambda seconds: setattr(slurm, "job", CANCELLED))
    start_again(journal, "requeue")
    assert (slurm.said, journal.status.state) == (["requeue"], "cancelled")


@pytest.mark.parametrize("action", ["requeue", "successor"])
def test_a_cancel_that_comes_after_the_last_attempt_is_carried_out(slurm: Slurm, journal: Journal, action: str) -> None:
    (journal.run.path / "requests").mkdir()
    journal.run.ask("cancel", journal.status)
    start_again(journal, action)
    assert (slurm.said, journal.status.state) == ([], "cancelled")


def test_a_cancel_takes_a_job_back_that_is_in_the_queue_again(slurm: Slurm, journal: Journal) -> None:
    (journal.run.path / "requests").mkdir()
    journal.run.ask("cancel", journal.status)
    slurm.job = replace(JOB, state="PENDING", restarts=1)  # the end of its processes took the answer along
    start_again(journal, "requeue")
    assert (slurm.said, journal.status.state) == (["scancel 7"], "cancelled")


def test_excluded_nodes_follow_the_requeue_beside_the_users_own(slurm: Slurm, journal: Journal) -> None:
    slurm.job = replace(JOB, excluded="n9")
    journal.append(AttemptEnded(attempt=1, cause="killed", next="requeue", avoid={"n2": 9e9}))
    start_again(journal, "requeue")
    assert slurm.said == ["requeue", "exclude n9,n2"]


def test_nodes_are_not_excluded_where_the_job_would_wait_for_ever(slurm: Slurm, journal: Journal) -> None:
    slurm.errors = {"test-only": [SchedulerError("Requested node configuration is not available")]}
    journal.append(AttemptEnded(attempt=1, cause="killed", next="requeue", avoid={"n2": 9e9}))
    start_again(journal, "requeue")
    assert slurm.said == ["requeue"]


@pytest.mark.parametrize("refusal", [True, False])
def test_a_successor_has_a_token_of_its_own(
    slurm: Slurm, journal: Journal, refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the decision says so, and where Slurm refuses the requeue: --no-requeue, JobRequeue=0."""
    for name in ("JOBKIT_RUNS", "JOBKIT_TOKEN"):
        monkeypatch.setenv(name, "x")
    slurm.errors = {"requeue": [SchedulerError("Requested operation is presently disabled")] if refusal else []}
    start_again(journal, "requeue" if refusal else "successor")
    assert slurm.said == ["sbatch --dependency=afterany:7"]
    submitted = journal.status.submitted
    assert submitted is not None and journal.status.state == "queued"
    assert (submitted.number, submitted.by, journal.status.person_submission) == (2, "supervisor", 1)
    assert submitted.token != "jobkit:toy:1:abc"
    assert [name for name in slurm.environment if name.startswith("JOBKIT_")] == ["JOBKIT_RUNS"]  # a person's


def test_the_successor_of_a_task_of_an_array_is_that_task_alone(slurm: Slurm, journal: Journal) -> None:
    journal.append(Submitted(token="jobkit:toy:1:abc", number=1, scheduler="slurm", task=3))
    start_again(journal, "successor")
    assert slurm.said == ["sbatch --dependency=afterany:7 --array=3"]


def test_a_successor_whose_sbatch_did_not_answer_is_looked_for(slurm: Slurm, journal: Journal) -> None:
    slurm.job = PREEMPTED
    slurm.errors = {"submit": [SchedulerTimeout("")]}
    slurm.queue = []
    start_again(journal, "successor")
    assert slurm.said == ["sbatch --dependency=afterany:7"]  # the first try did not get through
    slurm.queue = [replace(JOB, job_id="8", comment=str(journal.status.token))]
    start_again(journal, "successor")
    assert len(slurm.said) == 1
    assert journal.status.submitted is not None and journal.status.submitted.number == 2


@pytest.mark.parametrize(
    ("action", "errors"),
    [
        ("successor", {"submit": [SchedulerError("Job violates accounting/QOS policy")]}),
        ("requeue", {"show": [SchedulerMissing("scontrol is not on PATH")] * 2}),  # no wait brings it
    ],
)
def test_a_successor_that_slurm_refuses_leaves_the_run_to_a_person(
    slurm: Slurm, journal: Journal, action: str, errors: dict[str, list[SchedulerError]]
) -> None:
    slurm.errors = errors
    start_again(journal, action)
    assert (journal.status.state, slurm.said) == ("interrupted", [])


@pytest.mark.parametrize(
    ("usable", "lost", "said"),
    [
        (ALL, ("n3",), ["requeue"]),  # others can take its place
        ({"n1", "n2", "n3"}, ("n3",), ["sbatch --dependency=afterany:7 --nodes=2"]),  # no spare is left
        ({"n1", "n3"}, ("n3",), ["requeue"]),  # too few: the job waits for the node to come back
        ({"n1", "n2"}, (), ["requeue"]),
    ],
)
def test_fewer_nodes_where_the_job_would_wait_for_lost_ones(
    slurm: Slurm, journal: Journal, usable: set[str], lost: tuple[str, ...], said: list[str]
) -> None:
    slurm.usable = usable
    start_again(journal, "requeue", lost)
    assert slurm.said == said
