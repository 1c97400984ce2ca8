"""A script's outputs: `${run_dir}` leads them into the run directory, however the run is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, status

WRITES = """\
import os, sys
from pathlib import Path

out = Path(sys.argv[1].removeprefix("--out="))
(out / "samples.txt").write_text(os.environ["JOBKIT_RUN"])
if os.environ.get("BESIDE"):
    Path("metrics.json").write_text("{}")
"""
TASK = """\
from pathlib import Path


def train(ctx):
    Path(ctx.params.out, "samples.txt").write_text(str(ctx.run_dir))
"""
SCRIPT = """\
from pathlib import Path
import jobkit

ctx = jobkit.init(params={"out": "${run_dir}/outputs"})
Path(ctx.params.out, "samples.txt").write_text(str(ctx.run_dir))
ctx.finish()
"""
KINDS = {
    "task": "task: mytask:train\nparams: {out: '${run_dir}/outputs'}\n",
    "command": "command: [python, writes.py, '--out=${params.out}']\nparams: {out: '${run_dir}/outputs'}\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "writes.py").write_text(WRITES)
    return made


def assert_written(run: Path) -> None:
    assert (run / "outputs" / "samples.txt").read_text() == str(run)
    assert "${run_dir}/outputs" in (run / "config.yaml").read_text()
    assert status(run)["state"] == "finished"


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_in_the_run_directory_of_a_submission_and_of_a_launcher_alike(project: Project, kind: str) -> None:
    (project.path / "toy.yaml").write_text(f"name: toy\n{KINDS[kind]}")
    planned = project.jobkit("submit", "toy.yaml", "--dry-run", "--local").stdout
    assert "${run_dir}/outputs" in planned
    project.submit("--local")
    (run,) = project.runs
    assert f"{run}\n" in planned
    assert_written(run)
    elsewhere = project.path / "elsewhere"
    command = [sys.executable, "-m", "jobkit.worker", "toy.yaml", "--runs-dir", str(elsewhere)]
    subprocess.run(command, cwd=project.path, env=project.env, check=True)
    assert_written(elsewhere / run.name)  # of the same name: the path is not part of the identity


def test_outputs_of_a_script_with_init_are_in_its_run_directory(project: Project) -> None:
    (project.path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], cwd=project.path, env=project.env, check=True)
    (run,) = project.runs
    assert_written(run)
    (project.path / "script.py").write_text(
        SCRIPT.replace("run_dir}", "run_dirs}").replace("params=", "name='b', params=")
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=project.path, env=project.env, text=True, stderr=subprocess.PIPE
    )
    assert done.returncode != 0 and "${run_dirs}: there is no such key; did you mean 'run_dir'?" in done.stderr
    assert project.runs == [run]


def test_what_a_script_writes_beside_the_code_is_named_once_and_told_where_to_go(project: Project) -> None:
    (project.path / "toy.yaml").write_text(f"name: toy\n{KINDS['command']}")
    project.env["BESIDE"] = "1"
    project.submit("--local")
    said = project.submit("--local").stderr
    assert "written beside the code while the run trained: metrics.json; if these are its outputs" in said
    assert "${run_dir}/outputs" in said and "code changed" not in said
    (project.path / "writes.py").write_text(WRITES + "\n")
    assert "the code changed since it was last submitted: ~ writes.py\n" in project.submit("--local").stderr
