"""jobkit list: conditions, orders, columns, and the list of real run directories."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness.journals import began, ended, finished, make_run, submitted

from jobkit.cli.list import as_lines
from jobkit.cli.main import main
from jobkit.cli.rows import ordered, parse, read_rows
from jobkit.errors import InputError
from jobkit.run import records
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir


@pytest.mark.parametrize(
    ("text", "value", "is_met"),
    [
        ("lr>=0.03", 0.03, True),
        ("lr>=0.03", 0.029, False),
        ("lr<1e-2", 0.001, True),
        ("lr=0.10", 0.1, True),
        ("n=3", 3.0, True),
        ("n!=3", 4, True),
        ("seed = 9007199254740993", 9007199254740993, True),  # no float holds it
        ("flag=true", True, True),
        ("text=3", "3", True),
        ("text=3", "30", False),
        ("name=toy", "toy", True),
        ("name>2", "toy", False),  # a text is not above a number
        ("name~^t.y$", "toy", True),
        ("sizes=[1, 2]", [1, 2], True),
        ("sizes~2", [1, 2], True),
        ("lr>=0.03", None, False),
        ("lr!=0.03", None, False),
        ("lr=null", None, True),
        ("lr!=null", 0.1, True),
        ("lr!=null", None, False),
        ("lr=null", 0.1, False),
        ("lr<null", 0.1, False),
        ("name~none", "nonempty", True),
    ],
)
def test_conditions(text: str, value: Any, is_met: bool) -> None:
    assert parse(text).is_met_by(value) is is_met


@pytest.mark.parametrize("text", ["lr", "lr>=", ">3", "lr => 3", "name~["])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse(text)
    assert (refusal.value.key, refusal.value.found) == ("--where", text)


def test_order_is_by_kind_then_by_value_and_what_has_none_is_last() -> None:
    values = ["b", None, 3, 1.5, "a", [2], None]
    assert ordered(values, lambda value: value, largest_first=False) == [1.5, 3, [2], "a", "b", None, None]
    assert ordered(values, lambda value: value, largest_first=True) == ["b", "a", [2], 3, 1.5, None, None]


def test_a_narrow_terminal_loses_columns_from_the_right(runs_dir: Path) -> None:
    shown = read_rows([RunDir(runs_dir / "toy-00000002")])
    lines, dropped = as_lines(shown, ["run", "state", "params.net.pad_token", "path"], width=50)
    assert (lines[0].split(), lines[1].split()) == (
        ["RUN", "STATE", "params.net.pad_token"], ["toy-00000002", "failed", "<2>"]
    )  # fmt: skip
    assert dropped == ["path"]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Four runs: finished with a strange metric, failed, running, and one whose journal is older than jobkit."""
    runs = tmp_path / "runs"
    for number, lr in enumerate((0.1, 0.2), 1):
        config = {"name": "toy", "seed": 1, "params": {"lr": lr, "steps": 50, "net": {"pad_token": f"<{number}>"}}}
        ends = [ended("crashed", "fail", last_step=50, durable_step=40)]
        if number == 1:
            ends = [ended(last_step=50), finished({"acc[/top5]": 0.5, "loss": math.nan})]
        make_run(runs, f"toy-{number:08}", submitted(config=config), began(), *ends)
    running = make_run(runs, "toy-00000003", submitted(config={"params": {"lr": 0.3}}), began())
    report = Progress(attempt=1, time=time.time(), step=5, total_steps=50, steps_per_second=10, values={"v/[b]": 1.0})
    records.write(running.progress_file, report)
    (runs / "toy-00000004").mkdir()
    (runs / "toy-00000004" / "config.yaml").write_text("name: toy\n")
    return runs


def _list(capsys: pytest.CaptureFixture[str], runs_dir: Path, *words: str) -> str:
    assert main(["list", "--runs-dir", str(runs_dir), *words]) == 0
    return capsys.readouterr().out


def _rows(capsys: pytest.CaptureFixture[str], runs_dir: Path, *words: str) -> dict[str, dict[str, Any]]:
    rows = json.loads(_list(capsys, runs_dir, "--json", *words), parse_constant=pytest.fail)  # NaN is no JSON
    return {row["run"].removeprefix("toy-0000000"): row for row in rows}


def test_rows_for_programs(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(capsys, runs_dir)
    assert {number: row["state"] for number, row in rows.items()} == {
        "1": "finished", "2": "failed", "3": "lost", "4": "new",
    }  # fmt: skip
    assert (rows["1"]["result"], rows["1"]["step"]) == ({"acc[/top5]": 0.5, "loss": None}, 50)
    assert (rows["3"]["step"], rows["3"]["values"], rows["3"]["eta"]) == (5, {"v/[b]": 1.0}, None)
    assert rows["2"]["attempts"][0]["ended"]["cause"] == "crashed"


def test_columns_are_what_differs_and_what_was_found(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    title, *lines = _list(capsys, runs_dir, "toy-0000000[12]", "--sort", "-params.lr").splitlines()
    columns = "RUN STATE STEP ATTEMPTS params.lr params.net.pad_token acc[/top5] WHERE AGE"
    assert title.split() == columns.split()
    assert [line.split()[:6] for line in lines] == [
        ["toy-00000002", "failed", "50", "1", "0.2", "<2>"],
        ["toy-00000001", "finished", "50", "1", "0.1", "<1>"],
    ]


def test_a_metric_that_is_named_is_found_in_finished_runs_too(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(attempt=1, time=1.0, values={"train/loss": 0.25})
    records.write(RunDir(runs_dir / "toy-00000001").progress_file, progress)
    lines = _list(capsys, runs_dir, "toy-00000001", "--columns", "train/loss,step").splitlines()
    assert lines[1].split() == ["toy-00000001", "0.25", "50"]


def test_a_running_run_has_its_progress(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir(runs_dir / "toy-00000003").alive_lock():
        text = _list(capsys, runs_dir, "--where", "state=running", "--columns", "step,eta,v/[b],checkpoint")
    assert [line.split() for line in text.splitlines()] == [
        ["RUN", "STEP", "ETA", "v/[b]", "CHECKPOINT", "STATE"],
        ["toy-00000003", "5/50", "0:00:04", "1", "-", "running"],
    ]


def test_where_sort_and_csv(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--where", "params.lr>0.1", "--sort", "-params.lr", "--columns", "params.lr", "--csv"]
    text = _list(capsys, runs_dir, *words)
    assert list(csv.reader(text.splitlines())) == [
        ["run", "params.lr"], ["toy-00000003", "0.3"], ["toy-00000002", "0.2"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "key", "hint"),
    [
        (["--where", "lr>0"], "--where", "did you mean 'params.lr'?"),
        (["--columns", "stat"], "--columns", "did you mean 'state'?"),
        (["--sort", "-los"], "--sort", "did you mean 'loss'?"),
    ],
)
def test_an_unknown_name_is_refused(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], key: str, hint: str
) -> None:
    assert main(["list", "--runs-dir", str(runs_dir), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}: found") and hint in error and error.count("\n") == 1


def test_a_run_that_cannot_be_read_is_left_out(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobkit.cli import rows

    real = rows.cached_status

    def refuse(run: Any) -> Any:
        if run.name == "toy-00000002":
            raise PermissionError(13, "Permission denied", str(run.status_file))
        return real(run)

    monkeypatch.setattr(rows, "cached_status", refuse)
    assert main(["list", "--runs-dir", str(runs_dir), "--json"]) == 0
    answer = capsys.readouterr()
    assert len(json.loads(answer.out)) == 3 and "toy-00000002" in answer.err


def test_a_watched_list_is_shown_until_ctrl_c(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        (runs_dir / "toy-00000004" / "config.yaml").unlink(missing_ok=True)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    text = _list(capsys, runs_dir, "--watch", "0.1", "--columns", "state")
    assert (text.count("toy-00000001"), text.count("toy-00000004"), pauses) == (2, 1, [0.5, 0.5])


OUTPUTS = {"": 141, "> /dev/full": 2, ">&-": 0}
"""Where a shell sends the output -> exit code. The first is a pipe whose reader is gone."""


@pytest.mark.parametrize(("output", "code"), OUTPUTS.items())
def test_output_that_nobody_takes_shows_no_traceback(runs_dir: Path, output: str, code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    line = f"{sys.executable} -m jobkit list --runs-dir {runs_dir} {output}"
    done = subprocess.run(["bash", "-c", line], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_a_list_reads_one_file_of_each_run_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobkit.run import journal

    for number in range(5):
        make_run(tmp_path / "runs", f"toy-{number:08}", submitted(), began(), ended(), finished())
    monkeypatch.setattr(journal, "events", lambda run: pytest.fail("read a journal"))
    monkeypatch.setattr("jobkit.slurm.commands.run", lambda *words, **options: pytest.fail("asked Slurm"))
    assert main(["list", "--runs-dir", str(tmp_path / "runs")]) == 0


def test_the_step_is_the_one_of_the_newest_attempt_and_of_no_old_report(tmp_path: Path) -> None:
    dead = ended("killed", "in_place", last_step=10, durable_step=5)
    crashed = ended("crashed", "fail", 2, last_step=40, durable_step=35)
    run = make_run(tmp_path, "toy-11f5f19c", submitted(), began(), dead, began(2), crashed)
    records.write(run.progress_file, Progress(attempt=1, time=1.0, step=7, total_steps=50))
    (row,) = read_rows([run])
    assert (row.values["step"], row.values["checkpoint"], row.values["total_steps"]) == (40, 35, None)
