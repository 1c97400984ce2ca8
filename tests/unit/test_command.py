"""Which files of a command come from the code snapshot, and where a Python imports from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.worker import snapshot_path
from jobkit.worker.command import in_snapshot


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(snapshot, user's folder): the files of the second have changed since."""
    code, source = tmp_path / "code", tmp_path / "source"
    for folder in (code, source):
        (folder / "src").mkdir(parents=True)
        for name in ("train.py", "helper.py", "src/package.py", "run.sh"):
            (folder / name).write_text(f"where = {folder.name!r}\n")
        (folder / "tools").mkdir()
        for program in ("train.py", "tools/train.py"):
            text = "import sys, helper, package\nprint(helper.where, package.where, sys.argv[1:])\n"
            (folder / program).write_text(text)
    (source / "data.py").write_text("not in the snapshot")
    return code, source


COMMANDS = {
    "a script": (["python", "train.py", "--lr", "0.1"], ["python", "{code}/train.py", "--lr", "0.1"]),
    "an absolute path": (["python", "{source}/src/package.py"], ["python", "{code}/src/package.py"]),
    "a launcher": (["torchrun", "train.py"], ["torchrun", "{code}/train.py"]),
    "a shell": (["bash", "run.sh"], ["bash", "{code}/run.sh"]),
    "a file of no snapshot": (["python", "data.py"], ["python", "data.py"]),
    "a file outside": (["python", "../train.py"], ["python", "../train.py"]),
    "no program": (["python", "train.py", "--config=a.yaml"], ["python", "{code}/train.py", "--config=a.yaml"]),
    "an option -m of the program": (["python", "train.py", "-m", "x"], ["python", "{code}/train.py", "-m", "x"]),
}


@pytest.mark.parametrize(("typed", "words"), COMMANDS.values(), ids=COMMANDS)
def test_programs_come_from_the_snapshot(folders: tuple[Path, Path], typed: list[str], words: list[str]) -> None:
    code, source = folders
    typed, words = ([word.format(code=code, source=source) for word in items] for items in (typed, words))
    assert in_snapshot(typed, code, source) == words


@pytest.mark.parametrize("typed", [["train.py", "a"], ["-u", "-m", "train", "a"], ["tools/train.py", "a"]])
def test_a_python_imports_from_the_snapshot(folders: tuple[Path, Path], typed: list[str]) -> None:
    code, source = folders
    before = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}src"}
    words = [sys.executable, *in_snapshot(["python", *typed], code, source)[1:]]
    environment = {**before, **snapshot_path.environment(code, source, before)}
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "code code ['a']\n"
