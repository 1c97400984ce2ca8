"""The list of thousands of runs reads one file of each that has ended, and asks about those that have not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jobkit.cli.main import main
from jobkit.errors import InputError, SchedulerError
from jobkit.run.choose import find_run
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.runs import all_runs
from jobkit.run.status import Status
from jobkit.submission import overview

END: dict[str, tuple[Event, ...]] = {
    "finished": (Event.FINISHED,),
    "failed": (Event.FAILED,),
    "cancelled": (Event.CANCELLED,),
    "interrupted": (Event.INTERRUPTED,),
    "running": (),
    "queued": (Event.INTERRUPTED, Event.REQUEUED),
    "submitting": (Event.FINISHED, Event.SUBMITTING),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose job the scheduler is asked about."""
    names: list[str] = []

    def observe_all(found: Sequence[tuple[RunDir, Status]]) -> list[Status]:
        names.extend(run.name for run, _ in found)
        return [status for _, status in found]

    monkeypatch.setattr(overview.observer, "observe_all", observe_all)
    return names


def make(runs: Path, name: str, state: str = "finished", job: str = "7") -> RunDir:
    """A run in a state, as its events leave it."""
    run = RunDir(runs / name)
    run.path.mkdir(parents=True)
    run.config_file.write_text("name: toy\n")
    run.record(Event.SUBMITTING, cluster="h100", scheduler="slurm")
    run.record(Event.STARTED, attempt=1, job_id=job)
    run.record(Event.RESUMED, attempt=1, step=0, total_steps=100)
    for event in END[state]:
        run.record(event, attempt=1, step=40, cause="killed", cluster="h100", job_id=job)
    return run


def listed(runs: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> str:
    assert main(["list", "--runs-dir", str(runs), *(["--json"] if as_json else [])]) == 0
    return capsys.readouterr().out


def test_the_scheduler_is_asked_only_about_runs_to_which_more_may_happen(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for state in END:
        make(tmp_path, f"{state}-00000000", state)
    lines = {line.split()[0]: line.split()[1:] for line in listed(tmp_path, capsys).splitlines()}
    assert {name: row[0] for name, row in lines.items() if name.startswith(("f", "c", "i", "r", "q"))} == {
        f"{state}-00000000": state for state in END if state != "submitting"
    }
    assert lines["finished-00000000"] == ["finished", "40/100", "1", "h100", "7"]
    assert sorted(asked) == [f"{state}-00000000" for state in ("queued", "running", "submitting")]


def test_the_plain_list_is_the_status_of_each_run(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make(tmp_path, f"{state}-00000000", state) for state in END]
    plain = {one["run"]: one for one in json.loads(listed(tmp_path, capsys, as_json=True))}
    for run in runs:
        assert plain[run.name] == {
            "run": run.name,
            "path": str(run.path),
            **json.loads(json.dumps(run.status().as_dict())),
        }


def old(run: RunDir) -> None:
    before = run.status_file.read_bytes()
    run.record(Event.SUBMITTING, cluster="h100", scheduler="slurm")
    run.status_file.write_bytes(before)


def torn(run: RunDir) -> None:
    run.status_file.write_bytes(run.status_file.read_bytes()[:-9])


def of_an_earlier_jobkit(run: RunDir) -> None:
    plain = json.loads(run.status_file.read_text())
    del plain["journal_bytes"]
    run.status_file.write_text(json.dumps(plain))


def missing(run: RunDir) -> None:
    run.status_file.unlink()


@pytest.mark.parametrize("damage", [old, torn, of_an_earlier_jobkit, missing])
def test_a_status_that_does_not_follow_from_the_whole_journal_is_not_believed(
    damage: Callable[[RunDir], None], tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, "toy-00000000")
    damage(run)
    assert run.status().state in listed(tmp_path, capsys)
    assert asked == [run.name]


def test_the_list_does_not_depend_on_a_scheduler_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_answer(found: Sequence[tuple[RunDir, Status]]) -> list[Status]:
        raise SchedulerError("slurmctld is away")

    monkeypatch.setattr(overview.observer, "observe_all", no_answer)
    make(tmp_path, "toy-00000000", "running")
    assert "running" in listed(tmp_path, capsys)


def test_the_most_recently_changed_run_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("a-00000000", "b-00000000", "c-00000000")):
        os.utime(make(tmp_path, name).journal.path, (0, 1000 - age))
    (tmp_path / "empty").mkdir()
    (tmp_path / "being-0123abcd").mkdir()
    (tmp_path / "being-0123abcd" / "config.yaml").touch()
    assert [run.name for run in all_runs(tmp_path)] == ["a-00000000", "b-00000000", "c-00000000", "being-0123abcd"]
    assert all_runs(tmp_path / "none") == []


def test_a_runs_directory_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(InputError, match=f"cannot be read.*{tmp_path}"):
        all_runs(tmp_path)


def test_a_run_is_found_by_its_job_without_reading_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        make(tmp_path, f"toy-0000000{number}", job=str(100 + number))
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "status", lambda run: pytest.fail("it was read"))
        assert find_run("101", tmp_path).name == "toy-00000001"
    missing(RunDir(tmp_path / "toy-00000002"))
    assert find_run("102", tmp_path).name == "toy-00000002"


def test_a_folder_beside_the_runs_is_none_of_them(tmp_path: Path) -> None:
    make(tmp_path, "toy-00000000")
    for name in ("notes", "being-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("name: being\n")
    assert sorted(run.name for run in all_runs(tmp_path)) == ["being-00000001", "toy-00000000"]
    with pytest.raises(InputError, match="no run 'notes'"):
        find_run("notes", tmp_path)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("status.json", b'{"state": "fin'),
        ("status.json", b"[1]"),
        ("progress.json", b'{"attempt": 1, "time": "x", "values": [1]}'),
        ("events.jsonl", b'{"event": "checkpoint", "attempt": 1, "time": "x"}\n\xff\n[1]\nnull\n{"event": 3}\n'),
        ("events.jsonl", b'{"time": 1.0, "event": "checkpo'),
    ],
)
def test_what_is_damaged_in_a_run_hides_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: bytes
) -> None:
    run = make(tmp_path, "toy-00000000")
    make(tmp_path, "other-00000001")
    path = run.path / file
    before = path.read_bytes() if file == "events.jsonl" else b""
    (run.path / "status.json").unlink()  # what follows is derived from the journal
    path.write_bytes(before + damage)
    for verb in (
        ["list"],
        ["status", "*"],
        ["list", "*", "--columns", "state,loss,age"],
        ["diff", "toy", "other"],
        ["top", "*"],
    ):
        assert main([*verb, "--runs-dir", str(tmp_path)]) == 0, capsys.readouterr()
        assert "finished" in capsys.readouterr().out


def test_a_run_behind_a_link_is_the_one_where_the_link_is(tmp_path: Path) -> None:
    real = make(tmp_path / "elsewhere", "toy-00000000")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/toy-00000000").symlink_to(real.path)
    found = find_run("toy-00000000", tmp_path / "runs")
    assert found.path == tmp_path / "runs/toy-00000000"
    with real.alive_lock():
        assert found.has_local_supervisor()


def test_a_number_is_a_job_before_it_is_the_beginning_of_a_name(tmp_path: Path) -> None:
    make(tmp_path, "a-00000000", job="5")
    make(tmp_path, "b-00000000", job="51")
    assert find_run("5", tmp_path).name == "a-00000000"
    later = make(tmp_path, "c-00000000", job="4")
    later.record(Event.REQUEUED, job_id="5")
    later.record(Event.STARTED, attempt=2, job_id="5")
    earlier = RunDir(tmp_path / "a-00000000")
    earlier.record(Event.SUBMITTING, cluster="h100", scheduler="slurm")
    earlier.record(Event.SUBMITTED, job_id="6")
    assert find_run("5", tmp_path).name == "c-00000000", "who has it now, before who has had it"
    make(tmp_path, "5b-lm-00000000")
    with pytest.raises(InputError, match="'5' is ambiguous: the job of c-00000000 and the beginning of 5b-lm-00000000"):
        find_run("5", tmp_path)
    assert find_run("5b", tmp_path).name == "5b-lm-00000000"
    make(tmp_path, "4-00000000", job="4")
    assert find_run("4", tmp_path).name == "4-00000000"


def test_a_folder_of_the_project_with_a_config_is_not_taken_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, runs = tmp_path / "project", tmp_path / "project/runs"
    make(runs, "toy-00000000")
    (project / "toy").mkdir()
    (project / "toy/config.yaml").write_text("a: 1\n")  # as Hydra's users have
    monkeypatch.chdir(project)
    for text in ("toy", "runs/toy-00000000", str(runs / "toy-00000000")):
        assert find_run(text, runs).name == "toy-00000000"
    with pytest.raises(InputError, match="no run"):
        find_run(str(project / "toy"), runs)
