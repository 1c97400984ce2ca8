"""A run that begins at step 0 beside one of its name that was not finished says so."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from harness.made_run import made_run

from jobkit.run.config import Config, StartFrom
from jobkit.run.identity import run_name
from jobkit.run.left_unfinished import LOOKED_AT, left_unfinished
from jobkit.run.rundir import RunDir
from jobkit.worker.launched import begin, make_folders


@pytest.fixture
def last(tmp_path: Path) -> RunDir:
    """A run that has failed with a checkpoint of step 70."""
    return made_run(tmp_path / "made-0000000a")


def told(last: RunDir, config: Config) -> str:
    return left_unfinished(RunDir(last.path.parent / run_name(config)), config, RunDir.status)


def with_params(config: Config, **params: object) -> Config:
    return dataclasses.replace(config, params={**config.params, **params})


def test_the_last_run_of_the_name_and_what_differs_are_told(last: RunDir) -> None:
    config = with_params(last.config(), lr=0.2)
    first, second = told(last, config).splitlines()
    assert first == (
        f"{run_name(config)} is a new run, from step 0: params.lr 0.1 -> 0.2, compared with made-0000000a, "
        "failed at step 77/100"
    )
    assert "resume made-0000000a; " in second and second.endswith("this command with --from made-0000000a")


def test_of_many_differences_some_are_told(last: RunDir) -> None:
    config = with_params(last.config(), **{f"p{number}": number for number in range(9)})
    assert "params.p4 - -> 4 and 4 more, compared with" in told(last, config)


def test_nothing_is_told_of_a_run_that_is_there_or_starts_from_another(last: RunDir) -> None:
    config = with_params(last.config(), lr=0.2)
    start = StartFrom(run=last.name, step=70)
    assert told(last, dataclasses.replace(config, start_from=start)) == ""
    run = made_run(last.path.parent / run_name(config), lr=0.2)
    assert left_unfinished(run, config, RunDir.status) == ""


@pytest.mark.parametrize("state", ["finished", "cancelled", "no checkpoint"])
def test_nothing_is_told_of_a_run_to_which_nothing_is_left(tmp_path: Path, state: str) -> None:
    run = made_run(tmp_path / "made-0000000a", state="finished" if state == "finished" else "failed")
    journal = run.journal.path.read_bytes()
    if state == "cancelled":
        journal += b'{"time": 1700000200.0, "event": "cancelled", "attempt": 2}\n'
    elif state == "no checkpoint":
        lines = journal.splitlines(keepends=True)
        journal = b"".join(line for line in lines if b'"checkpoint"' not in line)
    run.journal.path.write_bytes(journal)
    assert told(run, with_params(run.config(), lr=0.2)) == ""


def test_only_the_last_run_of_the_name_counts(last: RunDir) -> None:
    newer = made_run(last.path.parent / "made-0000000b", lr=0.3, state="finished")
    later = last.journal.path.stat().st_mtime + 60
    os.utime(newer.journal.path, (later, later))
    assert told(last, with_params(last.config(), lr=0.2)) == ""
    made_run(last.path.parent / "made-other-0000000c", lr=0.4)
    assert told(last, dataclasses.replace(last.config(), name="made-other2")) == ""


def test_among_very_many_runs_of_the_name_none_is_looked_for(last: RunDir) -> None:
    config = with_params(last.config(), lr=0.2)
    for number in range(LOOKED_AT):
        (last.path.parent / f"made-{number:08x}").mkdir(exist_ok=True)
    assert told(last, config)
    (last.path.parent / f"made-{LOOKED_AT:08x}").mkdir()
    assert told(last, config) == ""


def test_what_cannot_be_read_is_not_told(last: RunDir) -> None:
    config = with_params(last.config(), lr=0.2)
    last.config_file.write_text("{")
    assert told(last, config) == ""


def test_a_script_that_a_launcher_starts_says_it_too(last: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    journal = last.journal.path.read_bytes()
    last.journal.path.write_bytes(journal.replace(b'"scheduler"', b'"launcher": "torchrun", "scheduler"', 1))
    config = with_params(last.config(), lr=0.2)
    run = RunDir(last.path.parent / run_name(config))
    make_folders(run)
    assert begin(run, config, "torchrun", run.alive_lock()) == 1
    said = capsys.readouterr().err
    assert "from step 0: params.lr 0.1 -> 0.2, compared with made-0000000a, failed at step 77/100; the values" in said
