"""A user is told of a run by a command of their own, once, and the run takes no harm from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status, wait_for

from jobkit.run import user_command
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.yamlfile import dump
from jobkit.supervisor import notifier
from jobkit.supervisor.notifier import Notifier

WRITES = 'echo "$JOBKIT_EVENT|$JOBKIT_TEXT" >> {told}'


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told"


def own_config(monkeypatch: pytest.MonkeyPatch, folder: Path, notify: Any) -> None:
    """The user's own file, with this under `notify:`."""
    (folder / "own.yaml").write_text(dump({"notify": notify}))
    monkeypatch.setenv("JOBKIT_CONFIG", str(folder / "own.yaml"))


def running(folder: Path) -> RunDir:
    run = RunDir(folder / "runs" / "x-1")
    run.logs(1).mkdir(parents=True)
    run.write_config(Config(name="x", task="a:b"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.STARTED, attempt=1, job_id="1")
    return run


def said(told: Path) -> list[str]:
    return told.read_text().splitlines() if told.exists() else []


def test_the_end_of_a_run_is_told_once_by_each_command(
    tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = WRITES.format(told=told)
    own_config(monkeypatch, tmp_path, command)
    run = running(tmp_path)
    notifier.keep(run, f"{command}.given")
    run.record(Event.FINISHED, attempt=1, step=3, result=None)
    for _ in range(2):  # as when another process finishes what the supervisor has left
        one = Notifier(run)
        one.attempt_ended()
        one.close()
    assert said(told) == said(told.with_name("told.given")) == ["finished|x-1: finished at step 3"]
    assert run.notify_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("when", "event", "fields", "expected"),
    [
        (["finished"], Event.FAILED, {"cause": "crashed", "error": "x"}, []),
        (["failed"], Event.FAILED, {"cause": "crashed", "error": "x\ny"}, ["failed|x-1: failed: x"]),
        (["cancelled"], Event.CANCELLED, {}, ["cancelled|x-1: cancelled"]),
        (["interrupted"], Event.INTERRUPTED, {"cause": "user"}, ["interrupted|x-1: interrupted"]),
    ],
)
def test_ends_that_nobody_asked_for_are_not_told(
    tmp_path: Path,
    told: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: list[str],
    event: Event,
    fields: Any,
    expected: Any,
) -> None:
    own_config(monkeypatch, tmp_path, {"command": WRITES.format(told=told), "when": when})
    run = running(tmp_path)
    run.record(event, attempt=1, **fields)
    one = Notifier(run)
    one.attempt_ended()
    one.close()
    assert said(told) == expected


def test_too_many_preemptions_are_told_once(tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_config(monkeypatch, tmp_path, {"command": WRITES.format(told=told), "preempted": 1})
    run = running(tmp_path)
    one = Notifier(run)
    for attempt in (1, 2, 3, 4):
        if attempt > 1:
            run.record(Event.STARTED, attempt=attempt, job_id="1")
        one.attempt_begins()
        assert len(one._threads) == (0 if attempt < 3 else 1)
        run.record(Event.INTERRUPTED, attempt=attempt, cause="preempted", step=attempt)
        run.record(Event.REQUEUED, attempt=attempt, job_id="1")
        one.attempt_ended()
    one.close()
    assert said(told) == ["preempted|x-1: preempted 2 time(s), goes on at step 2"]


def test_a_standstill_is_told_once_until_there_is_a_step(
    tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config(monkeypatch, tmp_path, {"command": WRITES.format(told=told), "no_progress": "10min"})
    now = [1000.0]
    monkeypatch.setattr(notifier.time, "monotonic", lambda: now[0])
    run = running(tmp_path)
    one = Notifier(run)
    # (seconds since the last look, step of the newest report, how often it was told by then)
    looks = [(599, None, 0), (2, None, 1), (601, None, 1), (1, 5, 1), (601, 5, 2), (601, 5, 2), (601, 6, 2)]
    for seconds, step, count in looks:
        now[0] += seconds
        if step is not None:
            run.progress_file.write_text(json.dumps({"attempt": 1, "step": step, "time": 0.0}))
        one.look()
        assert len(one._threads) == count
    for thread in one._threads:
        thread.join()
    assert said(told) == ["no_progress|x-1: no progress for 10min"] * 2


@pytest.mark.parametrize("text", ["notify: [", "notify: {command: x, when: 3}", "\udcff", "{" * 5000])
def test_a_users_file_that_has_become_wrong_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "own.yaml").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "own.yaml"))
    run = running(tmp_path)
    run.notify_file.write_text("[1]")
    one = Notifier(run)
    one.attempt_begins()
    one.look()
    run.record(Event.FINISHED, attempt=1, step=3, result=None)
    one.attempt_ended()
    one.close()


def test_a_run_directory_that_takes_nothing_does_no_harm(
    tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config(monkeypatch, tmp_path, WRITES.format(told=told))
    run = running(tmp_path)
    run.record(Event.FINISHED, attempt=1, step=3, result=None)
    run.notified_file.mkdir()  # as on a full disk: it cannot be replaced
    one = Notifier(run)
    one.attempt_ended()
    one.close()
    assert said(told) == []


def test_a_command_that_hangs_is_killed_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_command, "COMMAND_SECONDS", 2.0)
    beside = tmp_path / "beside"
    thread = user_command.start(f"sleep 600 & echo $! > {beside}; wait", {}, tmp_path / "log")
    thread.join(30)
    assert not thread.is_alive()
    number = int(beside.read_text())
    wait_for("the end of what it has started", lambda: is_gone(number))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_command_runs_where_it_was_typed_or_in_the_root_where_that_is_gone(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        user_command.start("pwd", {}, tmp_path / "log", str(folder)).join(30)
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "/"]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("notify", "expected"),
    [
        ({"when": ["finished"]}, "notify.command: missing"),
        ({"command": "x", "when": ["finishd"]}, "did you mean 'finished'?"),
        ({"command": "x", "preempted": -1}, "notify.preempted: found -1, expected never, or a number"),
        ({"command": "x", "no_progress": "soon"}, "notify.no_progress: found 'soon', expected never, or"),
        ({"comand": "x"}, "did you mean 'command'?"),
        (3, "notify: found 3"),
    ],
)
def test_a_mistake_in_it_is_refused_at_submission(tmp_path: Path, notify: Any, expected: str) -> None:
    project = Project(tmp_path)
    (tmp_path / "own.yaml").write_text(dump({"notify": notify}))
    project.env["JOBKIT_CONFIG"] = str(tmp_path / "own.yaml")
    done = jobkit(project, "submit", "toy.yaml", "--local", expect=2)
    assert "own.yaml:" in done.stderr and expected in done.stderr and project.runs == []


def test_a_real_run_tells_of_its_end_and_a_command_that_fails_changes_nothing(tmp_path: Path, told: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "own.yaml").write_text(
        json.dumps({"notify": {"command": WRITES.format(told=told), "when": ["finished"]}})
    )
    project.env["JOBKIT_CONFIG"] = str(tmp_path / "own.yaml")
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "params.steps=3")
    submitted = project.submit("--local", *small, "--notify", "echo said by $JOBKIT_NAME in $PWD; exit 3", "--json")
    found = json.loads(submitted.stdout)
    run = Path(found["path"])
    assert found["run"] == run.name and found["started"] and found["cluster"] == "local" and found["job_id"]
    waited = project.jobkit("wait", run.name, "--notify", "echo waited in $PWD")
    assert waited.stdout.splitlines() == [f"{run.name}: finished at step 3/3", f"waited in {tmp_path}"]
    again = json.loads(project.submit("--local", *small, "--json").stdout)
    assert (again["state"], again["started"], again["path"]) == ("finished", False, str(run))
    assert events(run)[-1]["event"] == "finished" and status(run)["state"] == "finished"
    project.jobkit("logs", "-f", run.name)  # its last lines are there when its supervisor has gone
    assert said(told) == [f"finished|{run.name}: finished at step 3/3"]
    assert (run / "logs/notify.log").read_text() == f"said by {run.name} in {tmp_path}\n"
    assert "echo" not in (run / "events.jsonl").read_text()
    assert (run / "notify.json").stat().st_mode & 0o777 == 0o600
