"""Agents on this machine that never become ready: each is given up, with the reason, and another one is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.dead_mount import dead_mount
from harness.runs import Project, is_alive, wait_until

LIMITS = """\
from jobkit.supervisor import allocation, starter
allocation.AGENT_SECONDS, starter.READY_SECONDS = 30.0, 20.0
"""

# Each start of an agent is a line of the file: what it does depends on how many came before.
STARTS = """\
import os, time
with open({file!r}, "a+") as file:
    file.write(f"{{os.getpid()}}\\n")
    file.seek(0)
    start = len(file.readlines())
"""

TASK = """\
import subprocess
import scripted_rank

def train(rank):
    if rank.attempt == {attempt}:
        subprocess.Popen(["cat", {file!r}])
        scripted_rank.fail("kill")
    return scripted_rank.train(rank)
"""


def starts(project: Project) -> list[int]:
    """Return the processes of the agents so far."""
    return [int(line) for line in (project.folder / "starts").read_text().split()]


def test_an_agent_that_hangs_is_given_up(project: Project) -> None:
    """In the start of Python, then in an import."""
    counts = STARTS.format(file=str(project.folder / "starts"))
    project.begin_with("jobkit.supervisor.main", LIMITS)
    project.begin_with("jobkit.agent.agent", f"{counts}if start == 1: time.sleep(1e6)")
    project.write("hangs.py", "import time, sitecustomize\nif sitecustomize.start == 2: time.sleep(1e6)")
    launch = project.submit("--local", "--detach", "preload=[hangs]", steps=5).wait_until_over()
    assert launch.causes == ["node_failure", "node_failure", "finished"]
    first, second, _ = (str(ended.error) for ended in launch.ends)
    assert "did not call" in first and "hangs" in second
    agents = starts(project)
    assert len(agents) == 3 and not any(is_alive(pid) for pid in agents[:2])


def test_a_cancel_ends_an_agent_that_has_not_called(project: Project) -> None:
    counts = STARTS.format(file=str(project.folder / "starts"))
    project.begin_with("jobkit.agent.agent", f"{counts}time.sleep(1e6)")
    launch = project.submit("--local", "--detach", steps=5)
    (agent,) = wait_until(lambda: (project.folder / "starts").exists() and starts(project), "an agent")
    project.jobkit("cancel", launch.run.name, "-y")
    assert launch.wait_until_over().status.state == "cancelled"
    wait_until(lambda: not is_alive(agent), "the end of the agent")


@pytest.fixture
def dead_file(project: Project) -> Iterator[Path]:
    """A file at which no process can look, and of which none gets away."""
    with dead_mount() as folder:
        yield folder / "file"


def test_processes_that_cannot_be_killed_hold_no_run_up(project: Project, dead_file: Path) -> None:
    """An agent in its imports, and a process that the ranks have left."""
    counts = STARTS.format(file=str(project.folder / "starts"))
    project.begin_with("jobkit.supervisor.main", LIMITS)
    project.write("reads.py", f"{counts}if start == 1: open({str(dead_file)!r})")
    project.write("leaves.py", TASK.format(attempt=2, file=str(dead_file)))
    words = ("task=leaves:train", "preload=[reads]")
    launch = project.submit("--local", "--detach", *words, steps=5).wait_until_over()
    assert launch.causes == ["node_failure", "killed", "node_failure", "finished"]
    assert "reads" in str(launch.ends[0].error)
    agents = starts(project)
    assert len(agents) == 3 and is_alive(agents[0]), "SIGKILL has ended it: nothing was shown"
