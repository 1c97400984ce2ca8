"""A run that a script began by itself: its own command is shown, and where its output is."""

from __future__ import annotations

import multiprocessing
import shlex
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from jobkit.cli.main import main
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.worker.launched import begin

SPAWNED = [sys.executable, "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"]

TYPED = [
    ("python", ["python", "train.py", "--lr", "1e-2"], "python train.py --lr 1e-2"),
    ("python", ["python3", "-m", "mine.train", "--name", "a b"], "python3 -m mine.train --name 'a b'"),
    ("python", ["python", "train.py", "--api-key", "abc"], "python train.py --api-key '***'"),
    ("torchrun", [sys.executable, "-u", "train.py", "--lr", "1e-2"], "train.py --lr 1e-2 under torchrun, as before"),
    ("mpirun", ["python", "train.py"], "python train.py under mpirun, as before"),
    ("RANK and WORLD_SIZE", ["python", "train.py"], "python train.py under its launcher, as before"),
    ("RANK and WORLD_SIZE", SPAWNED, "python train.py --spawned"),
]


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str = "python", *words: str) -> RunDir:
    """A run whose script was started by these words, and has stopped."""
    run = RunDir(tmp_path / "mine-12345678")
    run.path.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", list(words))
    monkeypatch.setattr(sys, "argv", ["train.py", "--spawned"])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if words == tuple(SPAWNED) else None)
    begin(run, Config(name="mine", task="train:main"), launcher, FileLock(tmp_path / "lock"))
    run.record(Event.INTERRUPTED, attempt=1, cause="user", step=3)
    return run


@pytest.mark.parametrize(("launcher", "words", "shown"), TYPED, ids=[shlex.join(row[1][-2:]) for row in TYPED])
def test_what_was_typed_is_what_to_type(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    words: list[str],
    shown: str,
) -> None:
    run = begun(tmp_path, monkeypatch, launcher, *words)
    assert main(["status", run.name]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"to continue it: {shown}   (in {tmp_path})"
    assert main(["resume", run.name]) == 2
    assert f"the same command continues it: {shown}" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_its_output_is_on_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run = begun(tmp_path, monkeypatch, "python", "python", "train.py")
    assert main(["logs", run.name, *options]) == 2
    said = capsys.readouterr().err
    assert "on the terminal where it was started" in said and "--rank" not in said
