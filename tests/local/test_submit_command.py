"""A refusal as a person at a terminal sees it: exit code, one line, and the same program under both of its names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.project import Project


def submit(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobkit.submit", *arguments]
    return subprocess.run(command, cwd=project.path, env=project.env, text=True, capture_output=True, timeout=600)


def test_a_mistake_ends_the_command_with_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for done in (
        submit(project, "toy.yaml", "--local", "task=mytask:trian"),
        project.submit("--local", "task=mytask:trian", expect=2),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: command line: task: mytask:trian: ")
        assert done.stderr.endswith("did you mean 'train'?\n")
    assert not (project.path / "runs").exists()


def test_submit_is_one_program_under_both_names(tmp_path: Path) -> None:
    project = Project(tmp_path)
    ours, theirs = project.jobkit("submit", "--help").stdout, submit(project, "--help").stdout
    first, second = (text.partition("[-h]") for text in (ours, theirs))
    assert (first[0].split(), second[0].split()) == (
        ["usage:", "python", "-m", "jobkit", "submit"],
        ["usage:", "python", "-m", "jobkit.submit"],
    )
    assert first[2].replace("-m jobkit submit", "-m jobkit.submit").split() == second[2].split()
    assert "75 interrupted" in " ".join(ours.split())


def test_a_task_that_turns_out_to_be_no_function_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text('X = int("3")\n')
    told = project.submit("--local", "task=mytask:X", expect=1).stderr
    assert "task: mytask:X is an int, not a function (would fail again: not retried)" in told
    assert "attempt 2" not in told


NO_PLAN = """
import torch


def train(ctx):
    ctx.parallelize(torch.nn.Linear(8, 8))
"""


def test_a_strategy_that_the_model_cannot_have_is_found_before_anything_is_queued(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(NO_PLAN)
    yaml = "name: toy\ntask: mytask:train\nresources: {tasks_per_node: 2}\nparallel: tensor\n"
    (project.path / "toy.yaml").write_text(yaml)
    done = project.submit("--dry-run", "--check-model", "--cluster", "slurm", expect=2)
    assert done.stderr.startswith("error: toy.yaml:4: parallel: tensor: Linear has no tensor_plan() that says how")
    assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
    assert not (project.path / "runs").exists()
