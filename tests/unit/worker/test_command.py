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
        for name in ("train.py", "helper.py", "src/package.py", "run.sh", "a.yaml"):
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
    "a file that is no program": (
        ["x", "--config=a.yaml", "-c", "a.yaml"],
        ["x", "--config={code}/a.yaml", "-c", "{code}/a.yaml"],
    ),
    "a name of no file": (["python", "train.py", "--config=b.yaml"], ["python", "{code}/train.py", "--config=b.yaml"]),
    "a folder": (["python", "train.py", "--out=src"], ["python", "{code}/train.py", "--out=src"]),
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
    environment = {**before, **snapshot_path.for_programs(code, source, before)}
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "code code ['a']\n"


@pytest.mark.parametrize("line", ["python train.py a", "python -um train a", "cd tools; python ./train.py a"])
def test_a_python_that_a_shell_starts_runs_the_submitted_program(folders: tuple[Path, Path], line: str) -> None:
    code, source = folders
    for program in ("train.py", "tools/train.py"):
        (source / program).write_text("raise SystemExit('the working copy')\n")
    before = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{source}/src"}
    environment = {**before, **snapshot_path.for_programs(code, source, before)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=source, env=environment, capture_output=True, text=True)
    assert done.stdout == "code code ['a']\n", done.stderr


def test_the_environments_own_sitecustomize_runs_too(folders: tuple[Path, Path], tmp_path: Path) -> None:
    code, source = folders
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    before = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    environment = {**before, **snapshot_path.for_programs(code, source, before)}
    words = [sys.executable, "-c", "import sys; print(customized, 'startup' in str(sys.path))"]
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
