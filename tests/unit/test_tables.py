"""What `jobkit list` shows of runs that differ: columns, order, groups, and the forms for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.cli.groups import Spread, spread
from jobkit.cli.list import sort
from jobkit.cli.main import main
from jobkit.cli.table import Cell, Table, as_latex, as_lines
from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.run.summary import Summary

RESULTS = {(0.003, 0): 0.5, (0.003, 1): 0.7, (0.03, 0): 0.9773, (0.03, 1): None}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, ((lr, seed), accuracy) in enumerate(RESULTS.items()):
        run = RunDir(tmp_path / f"digits-0000000{number}")
        run.path.mkdir(parents=True)
        config = Config(name="digits", task="a:b", seed=seed, params={"lr": lr, "width": 8, "hf_token": "secret"})
        run.write_config(config)
        run.record(Event.SUBMITTING, cluster="local", scheduler="local", **config.told())
        run.record(Event.STARTED, attempt=1, job_id=str(number))
        run.record(Event.RESUMED, attempt=1, step=0, total_steps=300)
        records.write(run.progress_file, Progress(attempt=1, time=0, step=200, values={"train/loss": 1 / (number + 1)}))
        result = {} if accuracy is None else {"result": {"accuracy": accuracy, "note": "a_b & c"}}
        event = Event.FAILED if accuracy is None else Event.FINISHED
        run.record(event, attempt=1, step=300, error="nan", **result)
        os.utime(run.journal.path, (1e9 - number, 1e9 - number))
    return tmp_path


@pytest.fixture
def listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, expect: int = 0) -> str:
        assert main(["list", "--runs-dir", str(runs), *arguments]) == expect
        told = capsys.readouterr()
        return told.out if expect == 0 else told.err

    return run


def test_columns_that_differ_are_found(listed: Any) -> None:
    lines = listed("digits*").splitlines()
    assert lines[0].split() == ["RUN", "params.lr", "seed", "STATE", "STEP", "ETA", "accuracy", "AGE"]
    assert lines[3].startswith("digits-00000002  0.03       0     finished  300/300  -    0.9773")
    assert lines[4].split()[1:7] == ["0.03", "1", "failed", "300/300", "-", "-"]


def test_the_order_and_columns_that_are_asked_for(listed: Any) -> None:
    text = listed("digits*", "--state", "finished", "--columns", "params.lr,seed", "--sort", "-accuracy")
    assert text == (
        "RUN              params.lr  seed  STATE     STEP     ETA  accuracy\n"
        "digits-00000002  0.03       0     finished  300/300  -    0.9773\n"
        "digits-00000001  0.003      1     finished  300/300  -    0.7\n"
        "digits-00000000  0.003      0     finished  300/300  -    0.5\n"
    )
    assert listed("--columns", "state,attempts", "--sort", "accuracy", "--limit", "2").splitlines() == [
        "RUN              STATE     ATTEMPTS  accuracy",
        "digits-00000000  finished  1         0.5",
        "digits-00000001  finished  1         0.7",
    ]


def test_what_is_logged_last_is_a_metric_too(listed: Any) -> None:
    assert [line.split()[0][-1] for line in listed("--where", "train/loss<0.4").splitlines()[1:]] == ["2", "3"]
    assert "train/loss  AGE" in listed("--state", "failed").splitlines()[0]


def test_groups_have_mean_and_spread(listed: Any) -> None:
    assert listed("--group-by", "params.lr") == (
        "params.lr  RUNS  STATES                accuracy\n"
        "0.003      2     2 finished            0.6 ± 0.14\n"
        "0.03       2     1 finished, 1 failed  0.9773 (1 of 2)\n"
    )
    rows = list(csv.DictReader(io.StringIO(listed("--group-by", "params.lr,seed", "--columns", "accuracy", "--csv"))))
    assert len(rows) == 4
    assert rows[3] == {
        "params.lr": "0.03", "seed": "1", "runs": "1", "accuracy.mean": "", "accuracy.sd": "", "accuracy.n": "0"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], None),
        ([3], Spread(1, 3.0, None)),
        ([1, 2, 3, 4], Spread(4, 2.5, 1.2909944487358056)),
        ([1e16, 1.0, -1e16], Spread(3, 1 / 3, 1e16)),
        ([1e308, 1e308], Spread(2, 1e308, 0.0)),
        ([1e200, 3e200], Spread(2, 2e200, math.sqrt(2) * 1e200)),
    ],
)
def test_mean_and_sample_standard_deviation(numbers: list[float], expected: Spread | None) -> None:
    found = spread(numbers)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.count, found.mean) == (expected.count, expected.mean)
        assert found.deviation == (None if expected.deviation is None else pytest.approx(expected.deviation, rel=1e-14))


def test_groups_go_by_their_values_or_by_the_mean_that_is_asked_for(listed: Any, runs: Path) -> None:
    os.utime(runs / "digits-00000003" / "events.jsonl")  # the latest first would begin with it

    def order(*arguments: str) -> list[str]:
        return [line.split()[0] for line in listed("--group-by", "params.lr", *arguments).splitlines()[1:]]

    assert order() == ["0.003", "0.03"]
    assert order("--sort", "-params.lr") == order("--sort", "-accuracy") == ["0.03", "0.003"]
    assert order("--sort", "accuracy", "--limit", "1") == ["0.003"]
    assert order("--sort", "-train/loss") == ["0.003", "0.03"], "by the mean, not by the largest run"


def test_runs_without_the_value_come_last_in_both_directions() -> None:
    values = {"a": 2, "b": None, "c": "text", "d": float("nan"), "e": 10.0, "f": 10**400}
    runs = [Summary(name, name, {"result": {"x": value}}) for name, value in values.items()]
    assert [one.run for one in sort(runs, "x", largest_first=False)] == ["a", "e", "f", "c", "b", "d"]
    assert [one.run for one in sort(runs, "x", largest_first=True)] == ["f", "e", "a", "c", "b", "d"]


def test_for_programs(listed: Any) -> None:
    rows = json.loads(listed("--columns", "params.lr,accuracy", "--sort", "-params.lr", "--json"))
    assert rows[1] == {
        "run": "digits-00000003", "params.lr": 0.03, "accuracy": None, "state": "failed", "step": 300, "eta": None
    }  # fmt: skip
    whole = json.loads(listed("--where", "accuracy>0.6", "--json"))
    assert [(one["run"], one["result"]["accuracy"]) for one in whole] == [
        ("digits-00000001", 0.7),
        ("digits-00000002", 0.9773),
    ]
    assert whole[0]["params"] == {"lr": 0.003, "width": 8, "hf_token": "***"}
    assert json.loads(listed("--state", "running", "--json")) == []
    latex = listed("--columns", "state,note", "--limit", "1", "--latex")
    assert "\ndigits-00000000 & finished & a\\_b \\& c \\\\\n" in latex


def test_what_was_logged_as_nan_is_null_for_programs(runs: Path, listed: Any) -> None:
    run = RunDir(runs / "digits-00000003")
    records.write(run.progress_file, Progress(attempt=1, time=0, step=200, values={"train/loss": float("nan")}))
    run.write_status()
    assert '"train/loss": null' in listed("--where", "train/loss=nan", "--json")
    assert '"train/loss": null' in listed("--where", "train/loss=nan", "--columns", "train/loss", "--json")


def test_what_is_under_way_is_in_no_mean_with_what_has_ended(runs: Path, listed: Any) -> None:
    for number, (event, fields) in enumerate([(Event.INTERRUPTED, {"cause": "user"}), (Event.FINISHED, {})]):
        run = RunDir(runs / f"more-0000000{number}")
        run.path.mkdir()
        config = Config(name="more", task="a:b", params={"lr": 0.03})
        run.write_config(config)
        run.record(Event.SUBMITTING, cluster="local", scheduler="local", **config.told())
        run.record(Event.STARTED, attempt=1, job_id="9")
        logged = {"accuracy": 0.1, "loss": 9.0 + number}
        records.write(run.progress_file, Progress(attempt=1, time=0, step=200, values=logged))
        run.record(event, attempt=1, step=300, **fields)
    lines = listed("--group-by", "params.lr", "--columns", "accuracy,loss").splitlines()
    assert "1 interrupted" in lines[2] and lines[2].split("  ")[-2:] == ["0.9773 (1 of 4)", "10 (1 of 4)"]
    assert "0.1 " in listed("more*", "--group-by", "params.lr", "--columns", "accuracy,loss"), (
        "no result to compare with"
    )


def test_a_result_that_is_no_number_is_neither_the_best_nor_left_out_of_a_mean(runs: Path, listed: Any) -> None:
    run = RunDir(runs / "digits-00000003")
    run.record(Event.FINISHED, attempt=1, step=300, result={"accuracy": "nan"})  # as to_json writes it
    assert listed("--columns", "accuracy", "--sort", "-accuracy").splitlines()[-1].split()[:2] == [run.name, "nan"]
    assert "nan" in listed("--group-by", "params.lr").splitlines()[2].split("finished")[1]
    assert [line.split()[0] for line in listed("--where", "accuracy=nan").splitlines()[1:]] == [run.name]
    assert '"accuracy": null' in listed("--where", "accuracy=nan", "--columns", "accuracy", "--json")


def test_latex_prints_every_sign_as_it_is() -> None:
    assert as_latex(Table(["a_b"], [[Cell("x", "50% $x^2$ \\ {~}")]])).splitlines()[4] == (
        r"50\% \$x\textasciicircum{}2\$ \textbackslash{} \{\textasciitilde{}\} \\"
    )


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    table = Table(["run", "params.lr", "accuracy"], [[Cell("a", "a"), Cell(0.1, "0.1"), Cell(0.25, "0.25")]])
    assert as_lines(table, 26) == (["run  params.lr  accuracy", "a    0.1        0.25"], [])
    assert as_lines(table, 20) == (["run  params.lr", "a    0.1"], ["accuracy"])
    assert as_lines(table, 2) == (["run", "a"], ["params.lr", "accuracy"])
    assert as_lines(table, 15, ["accuracy"]) == (["run  accuracy", "a    0.25"], ["params.lr"]), "asked for"
    assert as_lines(table, 2, ["accuracy"]) == (["run", "a"], ["params.lr", "accuracy"])


def test_what_a_run_may_hold_does_not_reach_the_terminal_as_it_is() -> None:
    lines, _ = as_lines(Table(["x"], [[Cell("", "a\x1b[2J\nb")], [Cell("", "y" * 99)]]))
    assert lines == ["x", "a?[2J?b", "y" * 37 + "..."]


def test_wide_signs_and_long_names_of_columns_keep_the_columns_below_each_other() -> None:
    lines, dropped = as_lines(
        Table(["名", "k" * 99, "z"], [[Cell("", text), Cell("", "x"), Cell(1, "1")] for text in ("ü💥", "a")])
    )
    assert lines == ["名   " + "k" * 37 + "...  z", f"ü💥  x{' ' * 39}  1", f"a    x{' ' * 39}  1"] and not dropped


def test_numbers_stand_with_their_points_below_each_other() -> None:
    cells = [Cell(value, text) for value, text in [(1e-5, "1e-05"), (10.25, "10.25"), (None, "-"), (-3, "-3")]]
    lines, _ = as_lines(Table(["x"], [[cell] for cell in cells]))
    assert lines == ["x", " 1e-05", "10.25", " -", "-3"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--columns", "lr"], "--columns: no run has 'lr'; did you mean 'params.lr'?"),
        (["--sort", "-acuracy"], "--sort: no run has 'acuracy'; did you mean 'accuracy'?"),
        (["--sort", "-"], "--sort '-': expected the name of a column"),
        (["--group-by", "zzz"], "--group-by: no run has 'zzz'; there are accuracy"),
        (["--state", "done"], "interrupted, finished, failed, cancelled; did you mean 'finished'?"),
        (["--state", "PENDING"], "did you mean 'queued'?"),
        (["--state", "NODE_FAIL"], "did you mean 'interrupted'?"),
        (["--state", "Error"], "did you mean 'failed'?"),
        (["--state", "RUNING"], "did you mean 'running'?"),
        (["zzz*"], "no run 'zzz*'"),
    ],
)
def test_what_no_run_has_is_refused_in_a_line(arguments: list[str], told: str, listed: Any) -> None:
    assert told in listed(*arguments, expect=2)


def test_watch_draws_again_on_a_terminal_until_ctrl_c(runs: Path) -> None:
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "jobkit", "list", "--watch", "0.5", "--runs-dir", str(runs)]
    environment = os.environ | {"LINES": "4", "COLUMNS": "80"}
    process = subprocess.Popen(command, stdout=terminal, stdin=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = b""
    while text.count(b"\x1b[H") < 2 or not text.endswith(b"\x1b[J"):
        text += os.read(shown, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    first = text.decode().split("\x1b[H")[1]
    assert "digits-00000000" in first
    assert "digits-00000003" not in first
    assert "... and 3 more; a higher terminal, or --limit" in first
    os.close(shown)


def test_watch_in_a_pipe_prints_once_more_each_time(runs: Path) -> None:
    command = [sys.executable, "-m", "jobkit", "list", "--watch", "0.5", "--runs-dir", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(10)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert lines[:5] == lines[5:]
    assert "\x1b" not in "".join(lines)
