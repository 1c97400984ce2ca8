"""A run gets its secrets and goes on with them, and no file that others can read shows them."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

from harness.project import Project, events, status

TASK = """
from pathlib import Path


def train(ctx):
    assert len(ctx.params.hf_token) == 9 and ctx.params.hf_token.startswith("hf_")
    for step in ctx.steps(2):
        if not Path("go").exists():
            raise RuntimeError("not yet")
    return {"is_there": True}
"""

SECRET = "hf_abc123"


def shown_in(folder: Path) -> list[str]:
    found = [file for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    return [str(file.relative_to(folder)) for file in found]


def test_a_run_with_a_secret_on_its_command_line_is_continued_with_it_and_shows_it_nowhere(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "retry.crash=0", "checkpoint.memory=off")
    failed = project.submit("--local", f"+params.hf_token={SECRET}", *small, expect=1)
    (run,) = project.runs
    assert shown_in(run.parent) == [f"{run.name}/secrets.json"]
    assert stat.S_IMODE((run / "secrets.json").stat().st_mode) == 0o600
    assert "+params.hf_token=***" in events(run)[0]["command"]
    looked = project.jobkit("status", run.name)
    assert (
        SECRET
        not in failed.stdout + failed.stderr + looked.stdout + project.jobkit("status", run.name, "--json").stdout
    )

    (to_continue,) = [line for line in looked.stdout.splitlines() if line.startswith("to continue it: ")]
    assert f"jobkit resume {run.name}" in failed.stderr
    words = shlex.split(to_continue.removeprefix("to continue it: "))
    assert words[:4] == ["python", "-m", "jobkit", "resume"]
    (project.path / "go").touch()
    project.jobkit(*words[3:])
    assert status(run)["result"] == {"is_there": True} and project.runs == [run]
    assert shown_in(run.parent) == [f"{run.name}/secrets.json"]
    again = project.submit("--local", f"+params.hf_token={SECRET}", *small)
    assert "already finished" in again.stdout, "the secret is part of what names the run"
