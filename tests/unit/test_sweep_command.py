"""What a sweep's options refuse, and what --dry-run shows: nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import in_process
from harness.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "params.lrr=1,2"], "params.lrr"),
        (["--sweep", "seed=a,b"], "seed: found 'a'"),
        (["--sweep", "seed"], "--sweep seed: expected key=v1,v2"),
        (["--sweep", "seed=1", "--no-sweep"], "--no-sweep: "),
        (["--sweep", "seed=1", "--max-running", "0"], "--max-running: found 0, expected 1 or more"),
        (["--sweep", "seed=1", "--fresh"], "--fresh is for one run"),
        (["--sweep", "seed=1", "--follow"], "--follow is for one run"),
        (["--sweep-file", "none.csv"], "none.csv: no such file"),
        (["--max-running", "3"], "--max-running is for a sweep"),
        (["--prune"], "--prune is for a sweep"),
        (["--first"], "--first is for a sweep"),
        (["--sweep", "task=mytask:other"], "defines no 'other'"),
        (["--sweep", "params.sleep=0,${nothing}"], "there is no such key"),
    ],
)
def test_a_slip_is_one_line_and_nothing_is_started(project: Project, arguments: list[str], said: str) -> None:
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", *arguments, expect=2)
    assert said in done.stderr and done.stderr.count("\n") <= 2, done.stderr
    assert not project.runs and not (project.path / "runs" / ".sweeps").exists()


def test_a_yaml_s_slip_names_its_line(project: Project) -> None:
    yaml = project.path / "toy.yaml"
    yaml.write_text(yaml.read_text() + "sweep: {seed: 3}\n")
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", expect=2)
    assert "toy.yaml:6: sweep.seed: found 3, expected a list of values" in done.stderr


def test_a_dry_run_shows_each_run_and_what_is_one(project: Project) -> None:
    done = in_process.jobkit(
        project, "submit", "toy.yaml", "--local", "--dry-run", "--sweep", "params.sleep=0,0.0,1", "seed=0,1"
    )
    *lines, total = done.stdout.splitlines()
    assert total == "4 run(s); 2 of 6 points are one run with another"
    assert all(line.startswith("toy-") and "seed=" in line for line in lines)
    assert not (project.path / "runs").exists()
