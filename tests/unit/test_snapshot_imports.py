"""What a Python process of a job imports, where a snapshot has copies of some of the user's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.repository import write

import jobkit
from jobkit.worker.startup import jobkit_snapshot

HERE = "print(module.__file__)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with packages of a user's own, of which some are in the snapshot `code` beside it."""
    names = ("pkg/__init__.py", "pkg/part.py", "src/own/part.py", "lib/one.py", "plain.py")
    write(tmp_path / "source", dict.fromkeys([*names, "left_out.py"], "WHERE = 'source'\n"))
    write(tmp_path / "code", dict.fromkeys(names, "WHERE = 'code'\n"))
    return tmp_path / "source"


def run(source: Path, statements: str, *, started: bool = True, **variables: str) -> list[str]:
    """What statements print in the folder, in a process that has `started` as one of a job, or that becomes one."""
    code = str(source.with_name("code"))
    environment = {**os.environ, **variables}
    if started:
        environment |= jobkit_snapshot.environment(str(source), code, environment)
    words = [sys.executable, "-c", f"import os, sys\n{statements}"]
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


BECOME = f"""
from {jobkit_snapshot.__name__} import SnapshotFinder
SnapshotFinder(os.getcwd(), os.path.join(os.path.dirname(os.getcwd()), "code")).use()
"""


def test_a_module_of_the_folder_is_the_snapshots(source: Path) -> None:
    assert run(source, "import pkg.part, plain; print(pkg.part.WHERE, plain.WHERE)") == ["code code"]


def test_a_module_of_which_there_is_no_copy_is_what_it_was(source: Path) -> None:
    assert run(source, "import left_out, json; print(left_out.WHERE)") == ["source"]


@pytest.mark.parametrize("entry", ["src", "{source}/src", "./src/../src"])
def test_wherever_a_program_looks_it_finds_the_snapshot(source: Path, entry: str) -> None:
    entry = entry.format(source=source)
    statements = f"sys.path.insert(0, {entry!r}); import own.part; print(own.part.WHERE, list(own.__path__))"
    assert run(source, statements)[0].startswith("code")
    assert run(source, "import own.part; print(own.part.WHERE)", PYTHONPATH=f"{source}/src") == ["code"]


def test_what_was_imported_before_is_imported_again(source: Path) -> None:
    statements = (
        f"import pkg.part, plain, left_out\n{BECOME}\nimport pkg.part, plain; print(pkg.part.WHERE, plain.WHERE)"
    )
    assert run(source, statements, started=False) == ["code code"]
    assert run(source, f"import left_out\n{BECOME}\nprint('left_out' in sys.modules)", started=False) == ["True"]


@pytest.mark.parametrize("linked", ["pkg", "plain.py"])
def test_what_is_linked_into_an_environment_is_the_snapshots(source: Path, linked: str) -> None:
    packages = source.with_name("site-packages")
    packages.mkdir()
    (packages / linked).symlink_to(source / linked)
    name = linked.removesuffix(".py")
    statements = f"sys.path[:] = [one for one in sys.path if one]; import {name}; print({name}.WHERE)"
    assert run(source, statements, PYTHONPATH=str(packages)) == ["code"]


def test_a_finder_with_names_of_its_own_and_a_loader_that_rewrites_are_kept(source: Path) -> None:
    statements = """
import importlib.machinery, importlib.util

class Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        return super().get_data(path) + b"REWRITTEN = True\\n" if path.endswith(".py") else super().get_data(path)

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "renamed":
            return importlib.util.spec_from_file_location(name, "lib/one.py", loader=Loader(name, "lib/one.py"))

sys.meta_path.append(Finder)
import renamed
print(renamed.WHERE, renamed.REWRITTEN)
"""
    assert run(source, statements) == ["code True"]


def test_what_an_installation_says_of_a_package_is_found(source: Path) -> None:
    write(source / "src/own.egg-info", {"PKG-INFO": "Name: own\nVersion: 7\n"})
    statements = "from importlib.metadata import version; import own.part; print(version('own'), own.part.WHERE)"
    assert run(source, f"sys.path.append('src')\n{BECOME}\n{statements}", started=False) == ["7 code"]


def test_a_script_of_the_folder_is_the_snapshots_with_its_options_and_arguments(source: Path) -> None:
    text = "import sys; print(__file__, sys.argv[1:], sys.flags.utf8_mode)\n"
    write(source, {"go.py": text})
    write(source.with_name("code"), {"go.py": text})
    ran = run(source, "import subprocess; subprocess.run(['python', '-X', 'utf8', 'go.py', '-x', '1'], check=True)")
    assert ran == [f"{source.with_name('code')}/go.py ['-x', '1'] 1"]


def test_the_environments_own_sitecustomize_runs_as_well(source: Path) -> None:
    write(source.with_name("site"), {"sitecustomize.py": "print('own', __name__)\n"})
    statements = "import sitecustomize, pkg; print(sitecustomize.__file__, pkg.WHERE)"
    site = source.with_name("site")
    assert run(source, statements, PYTHONPATH=str(site)) == ["own sitecustomize", f"{site}/sitecustomize.py code"]


@pytest.mark.parametrize("later", ["plain/__init__.py", "own.py", "installed.py"])
def test_what_came_into_the_folder_later_hides_no_module(source: Path, later: str) -> None:
    write(source.with_name("site"), {"installed.py": "WHERE = 'site'\n"})
    write(source, {later: "WHERE = 'later'\n"})
    statements = "import plain, own.part, installed; print(plain.WHERE, own.part.WHERE, installed.WHERE)"
    statements = f"sys.path.insert(0, os.getcwd()); {statements}"
    site = source.with_name("site")
    assert run(source, statements, PYTHONPATH=f"{source}/src{os.pathsep}{site}") == ["code code site"]


def test_a_snapshot_that_is_used_replaces_another(source: Path) -> None:
    write(source.with_name("other"), {"plain.py": "WHERE = 'other'\n"})
    other = BECOME.replace('"code"', '"other"')
    statements = f"{other}\nimport plain, json.tool; print(plain.WHERE)"
    assert run(source, statements) == ["other"]
    assert run(source, f"import plain\n{statements}") == ["other"]


def test_a_submission_leaves_the_snapshot_of_the_run_that_it_is_typed_in(source: Path) -> None:
    statements = f"""
from {jobkit_snapshot.__name__} import leave
leave(os.environ)
import own.part
print(own.part.WHERE, os.environ["PYTHONPATH"])
print([name for name in os.environ if name in ({jobkit_snapshot.CODE!r}, {jobkit_snapshot.SOURCE!r})])
"""
    package = str(Path(jobkit.__file__).parents[1])
    paths = f"{source}/src{os.pathsep}{package}"
    assert run(source, statements, PYTHONPATH=paths) == [f"source {paths}", "[]"]


PYTHONS = [sys.executable, *sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python")))]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).parents[1].name)
def test_a_program_in_any_python_runs_the_snapshot_with_its_options(source: Path, python: str) -> None:
    text = "import sys, plain; print(__file__, sys.argv[1:], sys.flags.optimize, sys.warnoptions, plain.WHERE)\n"
    write(source, {"go.py": text})
    write(source.with_name("code"), {"go.py": text})
    write(source.with_name("site"), {"sitecustomize.py": "print('own')\n"})
    environment = {**os.environ, "PYTHONPATH": str(source.with_name("site"))}
    environment |= jobkit_snapshot.environment(str(source), str(source.with_name("code")), environment)
    words = [python, "-uO", "-W", "error", "go.py", "-c", "1"]
    done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=False)
    expected = f"own\n{source.with_name('code')}/go.py ['-c', '1'] 1 ['error'] code\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_jobkit_is_imported_from_where_it_is_installed(tmp_path: Path) -> None:
    installed = Path(jobkit.__file__).parent
    (tmp_path / "code/jobkit").mkdir(parents=True)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(installed / name, tmp_path / "code/jobkit")
    (tmp_path / "source").symlink_to(installed.parent)
    ran = run(tmp_path / "source", "import jobkit.errors; print(jobkit.errors.__file__)", PYTHONPATH="")
    assert ran == [str(installed / "errors.py")]


def test_without_the_variables_nothing_changes(source: Path) -> None:
    startup = str(Path(jobkit_snapshot.__file__).parent)
    assert run(source, "import plain; print(plain.WHERE)", started=False, PYTHONPATH=startup) == ["source"]
