"""The index of the list is a shorter way to the same answer, whatever has become of it, and whoever else writes it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.run import index
from jobkit.run.choose import choose
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.runs import FoundRun, all_runs
from jobkit.run.summary import Facts, facts_of

RUNS = 6


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_RUNS", 2)
    monkeypatch.setattr(index, "REWRITE_RUNS", 1)
    for number in range(RUNS):
        make(tmp_path / "runs", number)
    return tmp_path / "runs"


def make(runs: Path, number: int, *, is_old: bool = False) -> RunDir:
    run = RunDir(runs / f"toy-0000000{number}")
    run.path.mkdir(parents=True)
    config = Config(name="toy", task="a:b", seed=number, params={"lr": number / 10})
    run.write_config(config)
    run.record(Event.SUBMITTING, cluster="local", scheduler="local", **({} if is_old else config.told()))
    run.record(Event.STARTED, attempt=1, job_id=f"9{number}")
    run.record(Event.FINISHED, attempt=1, step=5, result={"loss": number})
    return run


def expected(runs: Path) -> dict[str, Facts]:
    """What the journals say."""
    return {str(run.path): facts_of(run.status().as_dict()) for run in map(RunDir, runs.iterdir())}


def told(runs: Path) -> dict[str, Facts]:
    return json.loads(json.dumps(index.facts_of_ended(all_runs(runs))))  # type: ignore[no-any-return]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose own files are read."""
    names: list[str] = []
    real = FoundRun.final_status

    def final_status(run: FoundRun) -> object:
        names.append(run.name)
        return real(run)

    monkeypatch.setattr(FoundRun, "final_status", final_status)
    return names


def test_what_has_not_changed_is_not_read_again(runs: Path, read: list[str]) -> None:
    assert told(runs) == expected(runs)
    assert len(read) == RUNS
    read.clear()
    assert told(runs) == expected(runs)
    assert read == []
    RunDir(runs / "toy-00000003").record(Event.SUBMITTING, cluster="local", scheduler="local", name="toy")
    RunDir(runs / "toy-00000003").record(Event.SUBMIT_FAILED, error="no")
    make(runs, 7)
    assert told(runs) == expected(runs)
    assert sorted(read) == ["toy-00000003", "toy-00000007"]


def test_a_run_under_way_is_never_taken_from_the_index(runs: Path) -> None:
    told(runs)
    RunDir(runs / "toy-00000003").record(Event.SUBMITTING, cluster="local", scheduler="local")
    assert str(runs / "toy-00000003") not in told(runs)


def gone(file: Path) -> None:
    file.unlink()


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def changed(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"finished"', b'"failed"', 1))


def of_another_folder(file: Path) -> None:
    digest, body = file.read_bytes().split(b"\n", 1)
    assert digest == index._digest(file.parents[2] / "runs", body)
    file.write_bytes(index._digest(file.parents[2] / "others", body) + b"\n" + body)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def nonsense(file: Path) -> None:
    body = b'{"a": 1}'
    file.write_bytes(index._digest(file.parents[2] / "runs", body) + b"\n" + body)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [gone, torn, changed, of_another_folder, a_folder, nonsense, empty])
def test_a_damaged_index_changes_no_answer(damage: Callable[[Path], None], runs: Path, read: list[str]) -> None:
    before = told(runs)
    damage(index.index_file(runs))
    read.clear()
    assert told(runs) == before == expected(runs)
    assert len(read) == RUNS
    if damage is not a_folder:
        read.clear()
        assert told(runs) == before
        assert read == [], "it was made again"


def test_without_a_place_for_an_index_all_is_read(runs: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("/proc/nowhere", os.devnull):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        assert told(runs) == expected(runs)
    assert len(read) == 2 * RUNS


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_an_index_that_another_user_has_put_there_is_not_believed(runs: Path, read: list[str]) -> None:
    told(runs)
    os.chown(index.index_file(runs), 65534, 65534)
    read.clear()
    assert told(runs) == expected(runs)
    assert len(read) == RUNS


def test_only_its_owner_can_read_the_index(runs: Path) -> None:
    told(runs)
    assert index.index_file(runs).stat().st_mode & 0o077 == 0


def test_a_run_that_was_removed_or_is_too_large_is_not_in_the_index(runs: Path, read: list[str]) -> None:
    run = RunDir(runs / "toy-00000001")
    run.record(Event.SUBMITTING, cluster="local", scheduler="local", name="toy")
    run.record(Event.STARTED, attempt=2, job_id="91")
    run.record(Event.FINISHED, attempt=2, step=5, result=list(range(index.MAX_ENTRY_BYTES)))
    told(runs)
    (runs / "toy-00000002").rename(runs.parent / "elsewhere")
    make(runs, 8)
    read.clear()
    assert told(runs) == expected(runs)
    assert sorted(read) == ["toy-00000001", "toy-00000008"]
    assert b"toy-00000002" not in index.index_file(runs).read_bytes()


def test_params_of_runs_of_an_earlier_jobkit_come_from_their_config(runs: Path, read: list[str]) -> None:
    old = make(runs, 9, is_old=True)
    assert told(runs)[str(old.path)]["params"] == {}
    for _ in range(2):
        facts = index.facts_of_ended(all_runs(runs), with_config=True)[str(old.path)]
        assert (facts["name"], facts["seed"], facts["params"]) == ("toy", 9, {"lr": 0.9})
    assert read.count("toy-00000009") == 2, "once without, and once for its config"


def test_the_run_of_a_job_is_found_by_the_index(runs: Path, read: list[str]) -> None:
    for _ in range(2):
        assert [run.name for run in choose(["93"], runs)] == ["toy-00000003"]
    assert len(read) == RUNS


def test_several_at_once_leave_one_whole_index(runs: Path) -> None:
    told(runs)
    answers: list[bool] = []

    def look() -> None:
        for _ in range(20):
            index.index_file(runs).unlink(missing_ok=True)
            answers.append(told(runs) == expected(runs))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers)
    assert len(answers) == 80
    assert index._load(index.index_file(runs), runs).keys() <= {run.name for run in all_runs(runs)}
