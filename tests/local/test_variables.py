"""A run whose values come from variables of the shell goes on in another shell, which has others or none."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.project import Project, status

TASK = """
from pathlib import Path


def train(ctx):
    for step in ctx.steps(2):
        if not Path("go").exists():
            raise RuntimeError("not yet")
    return {"rate": ctx.params.rate}
"""


def test_what_is_said_to_continue_a_run_with_variables_in_it_needs_none_of_them(tmp_path: Path) -> None:
    project = Project(tmp_path, {"MY_RATE": "0.25"})
    (project.path / "mytask.py").write_text(TASK)
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "retry.crash=0", "checkpoint.memory=off")
    failed = project.submit("--local", "+params.rate=${oc.env:MY_RATE,'0.1'}", *small, expect=1)
    (run,) = project.runs
    assert f"jobkit resume {run.name}" in failed.stderr

    del project.env["MY_RATE"]  # another terminal
    for expected in (1, 0):  # what a resumed run says is as good as what the first submission said
        looked = project.jobkit("status", run.name)
        (to_continue,) = [line for line in looked.stdout.splitlines() if line.startswith("to continue it: ")]
        words = shlex.split(to_continue.removeprefix("to continue it: "))
        assert words[:4] == ["python", "-m", "jobkit", "resume"]
        if expected == 0:
            (project.path / "go").touch()
        project.jobkit(*words[3:], expect=expected)
    assert project.runs == [run] and status(run)["result"] == {"rate": "0.25"}


def test_a_variable_that_is_not_set_here_changes_nothing_of_what_is_said(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "retry.crash=0", "checkpoint.memory=off")
    failed = project.submit(
        "--local", "+params.rate=${oc.env:MY_RATE,'0.1'}", "+params.home=${oc.env:HOME}", *small, expect=1
    )
    assert "jobkit.submit" in failed.stderr and "jobkit resume" not in failed.stderr
