"""What a user installs: the wheel has all that a job needs, the batch script's shell part included."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness.project import Project, describe, status, wait_for
from slurm_cluster import Cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with the wheel; what the wheel depends on is taken from the tests' own."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in ("jobkit", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    run([*pip, "wheel", *offline, "--no-build-isolation", f"--wheel-dir={base}", str(source)], base)
    run([sys.executable, "-m", "venv", "--without-pip", str(base / "env")], base)
    inside = base / "env/bin/python"
    (wheel,) = base.glob("jobkit-*.whl")
    run([*pip, f"--python={inside}", "install", *offline, str(wheel)], base)
    (packages,) = base.glob("env/lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    return inside


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_run_submitted_from_an_installed_wheel_finishes(python: Path, slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    environment = {name: value for name, value in project.env.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def jobkit(*arguments: str) -> str:
        return run([str(python), "-m", "jobkit", *arguments], tmp_path, environment)

    where = run([str(python), "-c", "import jobkit; print(jobkit.__file__)"], tmp_path, environment)
    assert Path(where).is_relative_to(python.parents[1]), "else the test is of something else"
    submission = ("submit", "toy.yaml", "params.steps=3", "resources={nodes: 1, tasks_per_node: 1}")
    shown = jobkit(*submission, "--cluster", "slurm", "--dry-run")
    assert f"jobkit_python={python}" in shown and "jobkit_supervisor slurm" in shown
    jobkit(*submission, "--cluster", "slurm")
    (found,) = project.runs
    wait_for("the end", lambda: status(found).get("state") in ("finished", "failed"), found)
    assert status(found)["state"] == "finished", describe(found)
    assert str(python) in (found / "logs/submitit/submission.sh").read_text()
