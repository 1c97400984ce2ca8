"""`jobkit diff`: the differences of values and of code, and the command on two run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.journals import began, ended, finished, make_run, submitted

from jobkit.cli.diff import CODE_LINES, as_lines, code_lines, differences
from jobkit.cli.main import main
from jobkit.run import records, snapshot
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ({"params.lr": 0.3, "seed": 0}, {"params.lr": 0.01, "seed": 0}, ["params.lr  0.3 -> 0.01"]),
        ({"a": 1, "long": "x"}, {"a": 2, "long": "y"}, ["a     1 -> 2", "long  x -> y"]),
        ({"a": 1}, {"b": [1, 2]}, ["a  1 -> -", "b  - -> [1, 2]"]),
        ({"a": 1}, {"a": "1"}, ['a  1 -> "1"']),
        ({"a": True}, {"a": 1}, ["a  true -> 1"]),
        ({"a": None}, {}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": "two\nlines"}, {"a": "你"}, ['a  "two\\nlines" -> 你']),
    ],
)
def test_differences_are_aligned_lines(first: dict[str, Any], second: dict[str, Any], lines: list[str]) -> None:
    assert as_lines(differences(first, second)) == lines


def take(folder: Path, files: dict[str, bytes]) -> Path:
    """Return the snapshot of a project with these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return snapshot.take(folder, folder.parent / "runs")


def test_code_differs_by_lines(tmp_path: Path) -> None:
    common = {"same.py": b"same\n"}
    first = take(tmp_path / "a", {**common, "train.py": b"a\nb\nc\nd\ne\n", "old.py": b"x\n", "op.py": b"\0\1"})
    second = take(tmp_path / "b", {**common, "train.py": b"a\nb\nC\nd\ne\n", "new.py": b"y\n", "op.py": b"\0\2"})
    new = ["--- A/new.py", "+++ B/new.py", "@@ -0,0 +1 @@", "+y"]
    old = ["--- A/old.py", "+++ B/old.py", "@@ -1 +0,0 @@", "-x"]
    train = ["--- A/train.py", "+++ B/train.py", "@@ -2,3 +2,3 @@", " b", "-c", "+C", " d"]
    assert list(code_lines(first, second)) == [*new, *old, "op.py differs, and not in its lines", *train]
    assert list(code_lines(first, first)) == []
    assert list(code_lines(first, tmp_path / "gone")) == [f"no code snapshot in {tmp_path / 'gone'}"]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunDir]:
    """Two runs of one experiment, the second with another learning rate and longer code."""
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs_dir = tmp_path / "runs"
    end, result = ended(last_step=9), finished({"accuracy": 0.5, "best": {"at": 3}})
    first = make_run(runs_dir, "digits-aaaaaaaa", submitted(), began(), end, result)
    second = make_run(runs_dir, "digits-bbbbbbbb", submitted(), began(), ended("crashed", "fail", last_step=7))
    for run, rate, step, lines in ((first, 0.3, 9, 1), (second, 0.01, 7, 100)):
        # A variable of the environment that is not set here, and would be a secret.
        run.config_file.write_text(f"name: digits\nseed: 0\nparams: {{lr: {rate}, key: '${{oc.env:NO_SUCH_KEY}}'}}\n")
        records.write(run.progress_file, Progress(attempt=1, time=0, step=step, values={"train/loss": rate}))
        run.code.symlink_to(take(tmp_path / f"code{step}", {"train.py": b"".join(b"%d\n" % n for n in range(lines))}))
    return first, second


def test_diff_prints_only_differences(two: tuple[RunDir, RunDir], capsys: Capture) -> None:
    first, second = two
    assert main(["diff", "digits-a", str(second.path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["runs"] == [first.name, second.name]
    assert values["config"] == {"params.lr": [0.3, 0.01]}
    assert values["outcome"] == {
        "state": ["finished", "failed"],
        "step": [9, 7],
        "result.accuracy": [0.5, None],
        "result.best.at": [3, None],
        "logged.train/loss": [0.3, 0.01],
    }
    assert sum(line.startswith("+") for line in values["code"]) == 100  # 99 lines and the name of the file
    assert main(["diff", first.name, second.name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "params.lr          0.3 -> 0.01" and len(lines) == 6 + CODE_LINES + 1
    assert f"diff -r {first.code}/ {second.code}/" in lines[-1]
    assert main(["diff", first.name, first.name]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(("words", "part"), [(["digits*", "digits-a"], "digits-bbbbbbbb"), (["digits-a", "x"], "'x'")])
def test_each_word_means_one_run(words: list[str], part: str, two: tuple[RunDir, RunDir], capsys: Capture) -> None:
    assert main(["diff", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: RUN: found ") and part in error and error.count("\n") == 1
