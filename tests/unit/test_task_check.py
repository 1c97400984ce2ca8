"""What a submission says of a task that may run, or not: what setup lines provide, and what is not in the snapshot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.in_process import Done, jobkit
from harness.project import Project
from harness.repository import git, repository, write

from jobkit.errors import InputError
from jobkit.submission.task_check import check_command, check_task

TRAIN = "def train(ctx): pass\n"
SETUP = "clusters.slurm.setup=[module load library]"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    (made.path / "mytask.py").write_text(f"import os\nimport torchh.nn\n{TRAIN}")
    return made


def dry_run(project: Project, *arguments: str, expect: int = 0) -> Done:
    return jobkit(project, "submit", "toy.yaml", "--dry-run", *arguments, expect=expect)


def only_line(done: Done) -> str:
    # A thread that another test has left in this process may still ask for a Slurm that is gone, and say so here.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("jobkit: scontrol: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


# What the setup lines of a cluster may provide


def test_a_package_that_setup_lines_may_provide_is_a_warning(project: Project) -> None:
    line = only_line(dry_run(project, "--cluster", "slurm", SETUP))
    for said in ("mytask.py:2: import torchh.nn: no module 'torchh' here", "`setup` lines"):
        assert said in line


def test_it_is_refused_where_there_are_no_setup_lines(project: Project) -> None:
    for place in (["--cluster", "slurm"], ["--local", SETUP], ["--cluster", "here", "clusters.here.scheduler=local"]):
        done = dry_run(project, *place, expect=2)
        assert "mytask.py:2: import torchh.nn: no module 'torchh'; install it" in done.stderr


def test_modules_of_the_users_own_are_refused_with_setup_lines_too(project: Project) -> None:
    write(project.path, {"mytask.py": f"import pkg.nosuch\n{TRAIN}", "pkg/__init__.py": ""})
    assert "pkg.nosuch" in dry_run(project, "--cluster", "slurm", SETUP, expect=2).stderr
    assert "no module 'mytsk'" in dry_run(project, "--cluster", "slurm", SETUP, "task=mytsk:train", expect=2).stderr


@pytest.mark.parametrize("words", ["nosuchprogram, --fast", "python, -m, nosuchmodule"])
def test_a_program_that_setup_lines_may_provide_is_a_warning(project: Project, words: str) -> None:
    (project.path / "toy.yaml").write_text(f"name: toy\ncommand: [{words}]\n")
    line = only_line(dry_run(project, "--cluster", "slurm", SETUP))
    assert "nosuch" in line and "`setup` lines" in line
    assert "nosuch" in dry_run(project, "--cluster", "slurm", expect=2).stderr


# What is imported from elsewhere


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package `outerpkg` that Python looks in, as after `pip install -e`."""
    write(tmp_path / "library", {"outerpkg/__init__.py": "", "outerpkg/train.py": TRAIN, "outermodule.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "library")
    return tmp_path / "library"


def test_a_package_outside_the_snapshot_is_named_once(project: Project, library: Path) -> None:
    (project.path / "mytask.py").write_text(f"import outerpkg\nimport outermodule\nimport outerpkg, torch\n{TRAIN}")
    lines = dry_run(project, "--local").stderr.splitlines()
    later = "which is outside the snapshot: later changes there reach the run"
    assert [line.removeprefix("jobkit: ") for line in lines] == [
        f"outerpkg is imported from {library}/outerpkg, {later}",
        f"outermodule is imported from {library}/outermodule.py, {later}",
    ]


def test_a_task_outside_the_snapshot_is_named(project: Project, library: Path) -> None:
    assert f"{library}/outerpkg" in dry_run(project, "--local", "task=outerpkg.train:train").stderr


def test_what_is_installed_is_not_named(project: Project) -> None:
    (project.path / "mytask.py").write_text(f"import json, numpy, torch, jobkit, pytest, importlib.metadata\n{TRAIN}")
    assert dry_run(project, "--local").stderr == ""


# What is the user's own


def test_a_src_layout_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"src/ownpkg/__init__.py": "", "src/ownpkg/train.py": f"from . import part\n{TRAIN}"})
    write(tmp_path, {"src/ownpkg/part.py": "", "other.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "src")
    checked = check_task("ownpkg.train:train", tmp_path)
    assert {str(file) for file in checked.files} == {f"src/ownpkg/{name}.py" for name in ("__init__", "train", "part")}
    assert not checked.warnings


def test_what_a_script_imports_is_needed_and_what_is_missing_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"scripts/train.py": "import part, nosuch\nimport broken\n", "scripts/part.py": "import later\n"})
    write(tmp_path, {"scripts/later.py": "", "scripts/broken.py": "x = (", "unused.py": ""})
    files = check_command(["python", "scripts/train.py"], tmp_path).files
    assert {file.name for file in files} == {"train.py", "part.py", "later.py", "broken.py"}
    assert files[0] == Path("scripts/train.py")


LATER = """
import top
try:
    import tried, nosuch
    from nosuch import thing
except ImportError:
    pass


def train(ctx):
    from parts import called
    import outerpkg.train
    import broken
"""


@pytest.mark.parametrize("has_setup", [False, True])
def test_what_is_imported_in_a_function_or_a_try_is_needed_and_may_be_missing(tmp_path: Path, has_setup: bool) -> None:
    write(tmp_path, {"mytask.py": LATER, **dict.fromkeys(("top.py", "unused.py", "parts/__init__.py"), "")})
    write(tmp_path, {"tried.py": "import nosuch\nimport deeper\n", "deeper.py": "", "broken.py": "x = ("})
    write(tmp_path, {"parts/called.py": "def late():\n    from . import latest\n", "parts/latest.py": ""})
    checked = check_task("mytask:train", tmp_path, has_setup=has_setup)
    names = {"mytask", "top", "tried", "deeper", "broken", "parts/__init__", "parts/called", "parts/latest"}
    assert {str(file.with_suffix("")) for file in checked.files} == names
    assert checked.warnings == []


def test_what_must_be_there_is_refused_although_a_function_imports_it_too(tmp_path: Path) -> None:
    write(tmp_path, {"mytask.py": f"def late():\n    import part\nimport part\n{TRAIN}", "part.py": "import nosuch\n"})
    with pytest.raises(InputError, match=r"part.py:1: import nosuch"):
        check_task("mytask:train", tmp_path)


@pytest.mark.parametrize("program", ["torchrun", "bash"])
def test_what_a_script_of_another_program_imports_is_needed(tmp_path: Path, program: str) -> None:
    write(tmp_path, {"train.py": "import part\n", "part.py": ""})
    assert set(map(str, check_command([program, "train.py"], tmp_path).files)) == {"train.py", "part.py"}


def test_a_folder_of_data_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    write(tmp_path, {"mytask.py": f"from yaml import safe_load\n{TRAIN}", "yaml/data.txt": ""})
    assert check_task("mytask:train", tmp_path).warnings == []


def test_an_import_from_a_submodule_that_is_not_checked_out_is_refused(project: Project, tmp_path: Path) -> None:
    source = repository(tmp_path / "source", {"__init__.py": "", "model.py": ""})
    repository(project.path, {})
    git(project.path, "submodule", "add", "--quiet", str(source), "libs/parts")
    for line in (
        "import libs.parts",
        "from libs.parts import model",
        "import libs.parts.model",
        "from libs import parts",
    ):
        (project.path / "mytask.py").write_text(f"{line}\n{TRAIN}")
        git(project.path, "submodule", "update", "--init", "--quiet")
        dry_run(project, "--local")
        git(project.path, "submodule", "deinit", "--force", "--quiet", "libs/parts")
        said = dry_run(project, "--local", expect=2).stderr
        assert "mytask.py:1" in said and "git submodule update --init" in said, line


def test_torch_is_not_imported(tmp_path: Path) -> None:
    write(tmp_path, {"mytask.py": f"import nosuchheavy.thing\n{TRAIN}"})
    before = set(sys.modules)
    check_task("mytask:train", tmp_path, has_setup=True)
    assert not {name for name in set(sys.modules) - before if name.startswith("torch")}


def test_folders_without_init_are_packages_within_each_other(tmp_path: Path) -> None:
    write(tmp_path, {"mytask.py": f"import a.b.c\nfrom a.b.c import part\n{TRAIN}", "a/b/c/part.py": ""})
    assert {str(file) for file in check_task("mytask:train", tmp_path).files} == {"mytask.py", "a/b/c/part.py"}


def test_a_package_that_the_code_finds_by_sys_path_may_be_there(tmp_path: Path) -> None:
    write(tmp_path, {"mytask.py": f"import sys\nsys.path.insert(0, 'third')\nimport vendored\n{TRAIN}"})
    (warning,) = check_task("mytask:train", tmp_path).warnings
    assert "mytask.py:3: import vendored" in warning and "sys.path" in warning
    write(tmp_path, {"mytask.py": f"import vendored\n{TRAIN}"})
    with pytest.raises(InputError, match="no module 'vendored'"):
        check_task("mytask:train", tmp_path)


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("PYTHONPATH=src python train.py", True),
        ('export A=1 PYTHONPATH="$PWD"', True),
        ("unset PYTHONPATH", True),
        ("PYTHONPATH=src:$PYTHONPATH python train.py", False),
        ("export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}src", False),
        ("# PYTHONPATH=src", False),
        ("MY_PYTHONPATH=src", False),
    ],
)
def test_a_shell_script_that_keeps_the_snapshot_from_its_programs_is_named(
    tmp_path: Path, line: str, is_told: bool
) -> None:
    (tmp_path / "run.sh").write_text(f"set -e\n{line}\necho $PYTHONPATH\n")
    warnings = check_command(["bash", "run.sh"], tmp_path).warnings
    assert [f"{tmp_path}/run.sh:2: PYTHONPATH without $PYTHONPATH" in one for one in warnings] == [True] * is_told
