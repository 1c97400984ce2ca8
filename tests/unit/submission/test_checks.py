"""What a submission refuses before anything is queued; nothing of the user is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jobkit.config import yamlfile
from jobkit.config.load import load
from jobkit.errors import InputError
from jobkit.run.rundir import RunDir
from jobkit.submission import checks, user_code
from jobkit.submission.plan import LaunchPlan, make_plan, target

FILES = {
    "mytask.py": "raise SystemExit('it was imported')\ndef train(rank): ...\nLIMIT = 3\n",
    "stars.py": "from mytask import *\n",
    "guarded.py": "if LATER:\n    def train(rank): ...\n",
    "broken.py": "def train(:\n",
    "package/__init__.py": "",
    "package/inner.py": "class Task: ...\n",
    "train.py": "print(1)\n",
    "above.py": "import sys\nsys.path.append(__file__ + '/../..')\nimport shared_code, mytask\n",
    "above_task.py": "__file__\nfrom shared_code.models import Net\ndef train(rank): ...\n",
    "beside.py": "import sys\nsys.path.append('..')  # the folder of the command\nimport shared_code, mytask\n",
    "../shared_code/models.py": "",
    "../images/1.png": "",
    "own.py": "__file__\nimport images\ndef train(rank): ...\n",  # from a folder that it adds to its path
    "data/x": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project, the current one."""
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def plan(folder: Path, runs: str = "runs", entry: dict[str, Any] | None = None, **values: Any) -> LaunchPlan:
    file = folder / "exp.yaml"
    file.write_text(yamlfile.dump({"name": "toy", "clusters": {"a": entry or {}}, **values}))
    loaded = load(file)
    return make_plan(loaded, folder / runs, target(loaded.config, local=False, cluster="a"))


GOOD: list[dict[str, Any]] = [
    {"task": "mytask:train"},
    {"task": "mytask:LIMIT"},
    {"task": "stars:anything"},
    {"task": "guarded:train"},
    {"task": "package.inner:Task"},
    {"task": "json:dumps"},
    {"task": "own:train"},
    {"command": ["python", "beside.py"]},
    {"command": ["python", "train.py", "--out=${run_dir}"]},
    {"command": ["python3", "-u", "-W", "ignore", "train.py"]},
    {"command": ["python", "-m", "package.inner"]},
    {"command": ["python", "-c", "1"]},
    {"command": ["bash", "-c", "exit 3"]},
    {"task": "mytask:train", "inputs": ["data/x", "data"]},
    {"command": ["python", "train.py", "data/x"], "code": {"exclude": ["data"]}},  # data stays where it is
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_what_is_there_is_accepted(folder: Path, values: dict[str, Any]) -> None:
    assert checks.check(plan(folder, **values), folder) == []


@pytest.mark.parametrize("values", [{"task": "above_task:train"}, {"command": ["python", "above.py"]}], ids=str)
def test_a_module_of_a_folder_above_is_said_for_the_job_has_a_copy(folder: Path, values: dict[str, Any]) -> None:
    (note,) = checks.check(plan(folder, **values), folder)
    assert f"type the command in {folder.parent}" in note


REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [  # config, key, found, part of the hint
    ({"task": "mytsk:train"}, "task", "mytsk", "'mytask'"),
    ({"task": "mytask:trian"}, "task", "trian", "'train'"),
    ({"task": "package.iner:Task"}, "task", "package.iner", ""),
    ({"task": "mytask.py:train"}, "task", "mytask.py", ""),
    ({"task": "package:Task"}, "task", "Task", ""),
    ({"task": "data:train"}, "task", "the folder data", ""),
    ({"command": ["pyhton", "train.py"]}, "command", "pyhton", "'python'"),
    ({"command": ["python", "trian.py"]}, "command", "trian.py", "'train.py'"),
    ({"command": ["python", "-m", "pakage"]}, "command", "pakage", ""),
    ({"command": ["python", "-u"]}, "command", "python", ""),
    ({"task": "package.inner:Task", "code": {"exclude": ["package"]}}, "code.exclude", ["package"], ""),
    ({"command": ["python", "train.py"], "code": {"exclude": ["t*.py"]}}, "code.exclude", ["t*.py"], ""),
    ({"task": "mytask:train", "inputs": ["data/y"]}, "inputs", "data/y", ""),
    ({"task": "mytask:train", "inputs": ["~/data"]}, "inputs", "~/data", "whole path"),
]


@pytest.mark.parametrize(("values", "key", "found", "hint"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_is_not_there_is_refused(folder: Path, values: dict[str, Any], key: str, found: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        checks.check(plan(folder, **values), folder)
    assert (caught.value.key, caught.value.found) == (key, found)
    assert hint in caught.value.hint


@pytest.mark.parametrize("values", [{"task": "broken:train"}, {"command": ["python", "broken.py"]}])
def test_a_file_that_is_no_python_is_refused_with_its_line(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        checks.check(plan(folder, **values), folder)
    assert (caught.value.file, caught.value.line) == (folder / "broken.py", 1)


def test_the_folder_above_that_has_the_module_is_named(folder: Path) -> None:
    below = folder / "data"
    with pytest.raises(InputError) as caught:
        checks.check(plan(below, task="mytask:train"), below)
    assert str(folder) in caught.value.hint


@pytest.mark.parametrize("values", [{"task": "nowhere:train"}, {"command": ["nowhere"]}])
def test_setup_lines_may_provide_what_is_not_installed_here(folder: Path, values: dict[str, Any]) -> None:
    (note,) = checks.check(plan(folder, entry={"setup": ["module load nowhere"]}, **values), folder)
    assert "nowhere" in note


def test_a_mirror_without_its_package_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(InputError) as caught:
            checks.check(plan(folder, task="mytask:train", mirror={name: {}}), folder)
        assert (caught.value.key, caught.value.hint) == (f"mirror.{name}", f"pip install {package}")


def test_a_path_that_is_no_utf8_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        checks.check(plan(folder, runs="caf\udce9", task="mytask:train"), folder)
    assert caught.value.key == "--runs-dir"
    monkeypatch.setattr(sys, "executable", "/home/caf\udce9/.venv/bin/python")
    with pytest.raises(InputError) as caught:
        checks.check(plan(folder, task="mytask:train"), folder)
    assert (caught.value.key, caught.value.found) == ("Python", sys.executable)


@pytest.mark.parametrize("name", ["a%jb", "a\\b"])
def test_a_path_that_slurm_would_change_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        checks.check(plan(folder, runs=name, task="mytask:train"), folder)
    assert caught.value.key == "--runs-dir"
    local = {"scheduler": "local"}
    assert checks.check(plan(folder, runs=name, entry=local, task="mytask:train"), folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("name", [".", "config.yaml"])
def test_a_run_that_another_user_may_have_changed_is_not_continued(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.config_file.write_text("name: toy\n")
    checks.refuse_foreign(run)
    os.chown(run.path / name, 65534, -1)
    with pytest.raises(InputError) as caught:
        checks.refuse_foreign(run)
    assert caught.value.file == run.path / name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("name", ["config.yaml", "submitit/submitted.pkl", "code"])
def test_no_rank_executes_what_another_user_wrote(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    for folder in (run.submitit, run.code):
        folder.mkdir(parents=True)
    for file in (run.config_file, run.pickle_file):
        file.touch()
    run.refuse_foreign()
    os.chown(run.path / name, 65534, -1)
    with pytest.raises(InputError) as caught:
        run.refuse_foreign()
    assert caught.value.file == run.path / name


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_task_that_may_not_be_read_is_named() -> None:
    """The words name the file, and not the runs directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        (Path(name) / "train.py").touch(mode=0)
        os.seteuid(54321)
        try:
            with pytest.raises(InputError, match=r"train\.py: cannot be read: Permission denied"):
                list(user_code.check_task("train:train", Path(name)))
        finally:
            os.seteuid(0)
