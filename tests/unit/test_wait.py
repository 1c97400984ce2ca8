"""`jobkit wait` returns when runs are over, and tells of each in time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.in_process import jobkit
from harness.project import Project

from jobkit import slurm
from jobkit.cli import wait
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir

CLUSTER = "h100@host:6817"


def make(project: Project, name: str, *events: tuple[Event, dict[str, Any]], scheduler: str = "local") -> RunDir:
    """A run with a journal; it runs where that does not end it."""
    run = RunDir(project.path / "runs" / name)
    run.path.mkdir(parents=True)
    run.write_config(Config(name="toy", task="mytask:train"))
    slurm_cluster = CLUSTER if scheduler == "slurm" else None
    run.record(Event.SUBMITTING, cluster=scheduler, scheduler=scheduler, slurm_cluster=slurm_cluster)
    run.record(Event.SUBMITTED, job_id=name[-1])
    run.record(Event.STARTED, attempt=1, job_id=name[-1])
    for event, fields in events:
        run.record(event, attempt=1, **fields)
    return run


FINISHED = (Event.FINISHED, {"step": 3, "result": {"loss": 0.5}})
FAILED = (Event.FAILED, {"cause": "crashed", "error": "rank 0: ValueError: x\nmore"})
STOPPED = (Event.INTERRUPTED, {"cause": "user", "step": 2})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("names", "code"), [(["a-1"], 0), (["b-2"], 1), (["c-3"], 75), (["a-1", "c-3"], 75), (["?-*"], 1)]
)
def test_the_exit_code_is_the_worst_runs(project: Project, names: list[str], code: int) -> None:
    for name, event in (("a-1", FINISHED), ("b-2", FAILED), ("c-3", STOPPED)):
        make(project, name, event)
    done = jobkit(project, "wait", *names, expect=code)
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert len(lines) == (3 if names == ["?-*"] else len(names))
    assert lines.get("a-1", "a-1: finished at step 3") == "a-1: finished at step 3"
    assert lines.get("b-2", "b-2: failed: rank 0: ValueError: x; ").startswith("b-2: failed: rank 0: ValueError: x; ")


def test_a_run_that_ends_while_it_is_waited_for_is_told_then(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make(project, "a-1"), make(project, "b-2")]
    order = []

    def next_look(seconds: float) -> None:
        order.append(len(order))
        runs[len(order) - 1].record(*([Event.FINISHED]), attempt=1, step=3, result=None)

    locks = [run.alive_lock() for run in runs]  # their supervisors live
    for lock in locks:
        lock.acquire()
    monkeypatch.setattr(wait.time, "sleep", next_look)
    try:
        found = [(run.name, str(status.state)) for run, status in wait.ended(runs, None) if run is not None]
    finally:
        for lock in locks:
            lock.release()
    assert found == [("a-1", "finished"), ("b-2", "finished")] and order == [0, 1]


def test_any_returns_with_the_first_and_a_timeout_says_how_many_went_on(project: Project) -> None:
    make(project, "a-1", FINISHED)
    lock = make(project, "b-2").alive_lock()
    with lock:
        assert jobkit(project, "wait", "a-1", "b-2", "--any").stdout == "a-1: finished at step 3\n"
        done = jobkit(project, "wait", "a-1", "b-2", "--timeout", "1s", expect=124)
        assert done.stdout == "a-1: finished at step 3\n" and done.stderr == "1 of 2 run(s) went on after 0:00:01\n"
    for text in ("soon", "1", "1.5", "0s"):  # a number alone is minutes to sbatch, and seconds to timeout
        told = jobkit(project, "wait", "a-1", "--timeout", text, expect=2).stderr
        assert f"--timeout: found '{text}', expected a number with a unit: 30s, 10min, 2h, 30d" in told


def test_a_local_run_whose_supervisor_is_gone_is_over(project: Project) -> None:
    make(project, "a-1")
    assert jobkit(project, "wait", "a-1", expect=75).stdout.startswith("a-1: probably lost")


def test_slurm_is_asked_once_for_all(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def jobs_of(users: set[str], timeout: float = 0.0) -> list[slurm.JobInfo]:
        asked.append(users)
        return []

    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "cluster", lambda *_: CLUSTER)
    monkeypatch.setattr(slurm, "jobs_of", jobs_of)
    for number in range(3):
        make(project, f"a-{number}", scheduler="slurm")
    done = jobkit(project, "wait", "a-*", expect=75)
    assert len(asked) == 1 and len(done.stdout.splitlines()) == 3


def test_a_run_that_is_removed_meanwhile_is_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(project, "a-1")
    monkeypatch.setattr(wait.time, "sleep", lambda _: shutil.rmtree(run.path, ignore_errors=True))
    with run.alive_lock():
        assert jobkit(project, "wait", "a-1", expect=1).stdout == "a-1: its run directory is gone\n"


def test_programs_get_an_object_a_line_and_a_command_its_variables(project: Project) -> None:
    run = make(project, "a-1", FINISHED)
    told = project.path / "told"
    command = f'echo "$JOBKIT_NAME|$JOBKIT_STATE|$JOBKIT_RESULT|$JOBKIT_TEXT" > {told}'
    done = jobkit(project, "wait", "a-1", "--json", "--notify", command)
    found = json.loads(done.stdout)
    assert found["run"] == "a-1" and found["path"] == str(run.path) and found["exit_code"] == 0
    assert found["result"] == {"loss": 0.5}
    assert told.read_text() == 'a-1|finished|{"loss": 0.5}|a-1: finished at step 3\n'


def test_verbs_that_act_say_how_a_run_is_then_to_programs(project: Project) -> None:
    for name in ("a-1", "b-2"):
        make(project, name, FINISHED)
    done = jobkit(project, "cancel", "?-*", "-y", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((one["run"], one["state"], one["step"]) for one in found) == [
        ("a-1", "finished", 3),
        ("b-2", "finished", 3),
    ]
    assert jobkit(project, "preempt", "a-1", "--json", expect=1).stdout == ""
    refused = jobkit(project, "resume", "a-1", "--json", "--follow", expect=2)
    assert "--json prints an object a run" in refused.stderr
