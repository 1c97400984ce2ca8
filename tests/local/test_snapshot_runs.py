"""A run imports the user's modules from the snapshot, whatever led Python to the folder where they may have changed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness.project import Project, describe, events, status
from harness.repository import git, repository, write

ROOT = Path(__file__).parents[2]

ONE = ("resources.nodes=1", "resources.tasks_per_node=1")

# What each prints is one line for each module, with its name first.
TELL = """
import sys
from importlib.metadata import version


def tell(*modules):
    for module in modules:
        print(module.__name__, module.__file__, flush=True)
"""

TASK = """
import subprocess, sys
import flatpkg.part, srcpkg.part
from importlib.metadata import version
from srcpkg.tell import tell


def train(ctx):
    tell(sys.modules[__name__], flatpkg.part, srcpkg.part)
    statements = "import flatpkg.part, srcpkg.tell; srcpkg.tell.tell(flatpkg.part)"
    subprocess.run([sys.executable, "-c", statements], check=True)
    print("version", version("flatpkg"), flush=True)
    for step in ctx.steps(2):
        pass
"""

SCRIPT = """
import os, sys
sys.path.append(os.getcwd())
import beside, flatpkg.part, srcpkg.part
from srcpkg.tell import tell
tell(sys.modules["__main__"], beside, flatpkg.part, srcpkg.part)
"""

SETUP = """
from setuptools import setup

setup(name="flatpkg", version="7", packages=["flatpkg"], package_dir={"flatpkg": "py/flat"})
"""


def modules(run: Path) -> dict[str, Path]:
    """Where the modules came from that a run's first rank has named, by their names."""
    lines = (run / "logs/1/rank_0.out").read_text().splitlines()
    pairs = [line.split() for line in lines if len(line.split()) == 2 and line.endswith(".py")]
    assert pairs, describe(run)
    return {name: Path(file) for name, file in pairs}


def assert_all_in_snapshot(run: Path, *names: str) -> None:
    found = modules(run)
    assert set(names) <= set(found), describe(run)
    (code,) = (run / "code").iterdir()
    assert [file for file in found.values() if not file.is_relative_to(code)] == []
    assert status(run)["state"] == "finished", describe(run)


# Installed from the project


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in an environment with two packages of it: by a .pth file, and by the finder of `pip install -e`."""
    path = tmp_path_factory.mktemp("installed")
    write(path / "project/src/srcpkg", {"__init__.py": "", "tell.py": TELL, "part.py": "", "train.py": TASK})
    write(path / "project/flat", {"setup.py": SETUP, "py/flat/__init__.py": "", "py/flat/part.py": ""})
    write(path / "project", {"go/train.py": SCRIPT, "beside.py": "", ".gitignore": "runs\n*.egg-info\n.env\n"})
    (path / "project/run.sh").write_text("exec python -u ./go/train.py --flag\n")
    # In the project, as many have it: what is installed there is not taken for the project's own.
    run([sys.executable, "-m", "venv", "--without-pip", str(path / "project/.env")])
    (packages,) = path.glob("project/.env/lib/python*/site-packages")
    paths = [str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), f"{path}/project/src"]
    # Some tools import a package in every process; so a parent of ranks has it from the folder itself.
    (packages / "paths.pth").write_text("\n".join([*dict.fromkeys(paths), "import srcpkg.part"]))
    pip = [sys.executable, "-m", "pip", "--quiet", f"--python={path}/project/.env/bin/python", "install"]
    run([*pip, "--no-deps", "--no-index", "--no-build-isolation", "-e", f"{path}/project/flat"])
    assert list(packages.glob("__editable__*finder.py")), "else the test is of something else"
    return repository(path / "project", {})


def run(words: list[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def submit(project: Project, yaml: str) -> Path:
    """The run of a YAML, submitted in the project's own environment."""
    (project.path / "toy.yaml").write_text(yaml)
    before = set(project.runs)
    environment = {**project.env, "PATH": f"{project.path}/.env/bin:{project.env['PATH']}", "JOBKIT_WARM_PARENT": ""}
    environment.pop("PYTHONPATH", None)
    words = [f"{project.path}/.env/bin/python", "-m", "jobkit", "submit", "toy.yaml", "--local"]
    run(words, project.path, environment)
    (made,) = set(project.runs) - before
    return made


def test_a_task_in_an_editable_install_runs_the_snapshot(installed: Path) -> None:
    made = submit(Project(installed), "name: task\ntask: srcpkg.train:train\n")
    assert_all_in_snapshot(made, "srcpkg.train", "srcpkg.part", "flatpkg.part")
    assert "version 7" in (made / "logs/1/rank_0.out").read_text()


@pytest.mark.parametrize("command", ["[python, go/train.py]", "[bash, run.sh]", "[python, -m, go.train]"])
def test_a_command_in_an_editable_install_runs_the_snapshot(installed: Path, command: str) -> None:
    made = submit(Project(installed), f"name: command\ncommand: {command}\n")
    assert_all_in_snapshot(made, "__main__", "beside", "srcpkg.part", "flatpkg.part")


# Not as it was submitted


def test_a_run_submitted_within_a_run_has_a_snapshot_of_its_own(tmp_path: Path) -> None:
    project = Project(tmp_path)
    write(tmp_path, {"lib/part.py": "", "pipeline.sh": "python -m jobkit submit toy.yaml --local\n"})
    (tmp_path / "outer.yaml").write_text("name: outer\ncommand: [bash, pipeline.sh]\n")
    (tmp_path / "mytask.py").write_text(
        f"import part, sys\n{TELL}\ndef train(ctx): tell(sys.modules[__name__], part)\n"
    )
    (tmp_path / "toy.yaml").write_text("name: inner\ntask: mytask:train\n")
    project.env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "lib"), project.env.get("PYTHONPATH", "")])
    project.jobkit("submit", "outer.yaml", "--local")
    inner, _ = project.runs
    assert_all_in_snapshot(inner, "mytask", "part")


# Files with names of the standard library's


BROKEN = "raise RuntimeError('this is not the module of the standard library')\n"


@pytest.mark.parametrize("way", ["folder", "PYTHONPATH"])
def test_files_named_as_modules_of_the_standard_library_hide_none_from_jobkit(tmp_path: Path, way: str) -> None:
    project = Project(tmp_path)
    write(tmp_path, {"secrets.py": BROKEN, "queue.py": BROKEN, "select.py": BROKEN, "profile.py": BROKEN})
    (tmp_path / "mytask.py").write_text("def train(ctx):\n    for step in ctx.steps(2): pass\n")
    project.env["JOBKIT_WARM_PARENT"] = ""  # it has imported all that there is
    if way == "PYTHONPATH":
        project.env["PYTHONPATH"] = os.pathsep.join([".", project.env.get("PYTHONPATH", "")])
    project.submit("--local", *ONE)
    assert status(project.runs[0])["state"] == "finished", describe(project.runs[0])


def test_a_command_starts_beside_files_named_as_modules_of_the_standard_library(tmp_path: Path) -> None:
    project = Project(tmp_path)
    write(tmp_path, {"secrets.py": BROKEN, "queue.py": BROKEN, "train.py": "print('trains')\n"})
    (tmp_path / "toy.yaml").write_text("name: toy\ncommand: [python, train.py]\n")
    project.submit("--local")
    assert (project.runs[0] / "logs/1/rank_0.out").read_text() == "trains\n"


# Not the project's own files


def test_a_task_imports_from_submodules_clones_and_links(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    library = repository(tmp_path / "library", {"part.py": ""})
    write(tmp_path / "shared/linked", {"__init__.py": "", "part.py": ""})
    (project.path / "linked").symlink_to("../shared/linked")
    (project.path / "mytask.py").write_text(
        "import cloned.part, linked.part, parts.part\n"
        "def train(ctx):\n"
        "    for module in (cloned.part, linked.part, parts.part):\n"
        "        print(module.__name__, module.__file__, flush=True)\n"
        "    for step in ctx.steps(2): pass\n"
    )
    repository(project.path, {".gitignore": "runs\n"})
    git(project.path, "submodule", "add", "--quiet", str(library), "parts")
    git(project.path, "clone", "--quiet", str(library), "cloned")
    project.submit("--local", *ONE)
    assert_all_in_snapshot(project.runs[0], "cloned.part", "linked.part", "parts.part")


def test_modules_that_git_ignores_are_there_for_shell_scripts_and_imports_by_name(tmp_path: Path) -> None:
    files = {"pkg/__init__.py": "from ._version import VERSION\n", "nsp/a.py": "", "train.sh": "python train.py\n"}
    imports = "import pkg, importlib\ngen = importlib.import_module('nsp.gen.g')\n"
    files["train.py"] = f"{imports}print('gen', gen.__file__)\nprint('pkg', pkg.__file__, flush=True)\n"
    files["toy.yaml"] = "name: toy\ncommand: [bash, train.sh]\n"
    project = Project(tmp_path)
    repository(tmp_path, {**files, ".gitignore": "runs\n_version.py\ngen\n"})
    write(tmp_path, {"pkg/_version.py": "VERSION = 1\n", "nsp/gen/g.py": ""})
    project.submit("--local")
    assert_all_in_snapshot(project.runs[0], "gen", "pkg")


# What is said of it


def test_big_files_are_named_before_they_are_copied_or_left_out(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "toy.yaml").write_text("name: toy\ncommand: ['true']\n")
    for name, size in {"big.sh": 51 << 20, "weights.bin": 3 << 20}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    repository(tmp_path, {".gitignore": "runs\n"})
    said = project.submit("--local").stderr
    (made,) = project.runs
    assert "more than 2 MiB is not in the code snapshot: weights.bin (3.0 MiB)" in said
    assert "the code snapshot has 51 MiB" in said and "big.sh (51.0 MiB)" in said
    (code,) = (made / "code").iterdir()
    assert (code / "big.sh").stat().st_size == 51 << 20 and not (code / "weights.bin").exists()
    assert "MiB" not in project.submit("--local").stderr, "nothing is copied for a run that has finished"


# The same config again


def test_resume_takes_the_config_as_it_was_resolved(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "toy.yaml").write_text(
        "name: toy\n"
        "command: [bash, -c, 'echo rank \\${RANK} of ${params.what}; test -e allowed']\n"
        "params: {what: none}\n"
        "retry: {crash: 1}\n"
        "demo: {unless_env: JOBKIT_TEST_NOT_SET, params: {what: demo}}\n"
    )
    project.submit("--local", expect=1)
    (made,) = project.runs
    write(tmp_path, {"allowed": "", "toy.yaml": "name: changed\n"})
    project.env["JOBKIT_TEST_NOT_SET"] = "1"
    project.jobkit("resume", made.name)
    assert project.runs == [made] and status(made)["state"] == "finished", describe(made)
    assert (made / "logs/2/rank_0.out").read_text() == "rank 0 of demo\n"
    commands = {event["command"] for event in events(made) if event["event"] == "submitting"}
    assert len(commands) == 1 and "submit toy.yaml" in commands.pop(), "what continues the run is what was typed first"


def test_fresh_gives_no_number_a_second_time(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "toy.yaml").write_text("name: toy\ncommand: ['true']\n")
    for _ in range(2):
        project.submit("--local", "--fresh")
    first, second = project.runs
    run(["rm", "-r", str(second)])
    project.submit("--local", "--fresh")
    assert [made.name for made in project.runs] == [first.name, f"{first.name}-3"]
    assert f"already finished: {first}-3" in project.submit("--local").stdout
