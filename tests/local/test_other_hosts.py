"""A run here, seen from another host whose file system keeps locks to itself: it is not known, nobody touches it."""

from __future__ import annotations

import json
import socket

from conftest import end_processes
from harness.runs import Project

ELSEWHERE = """
import fcntl, socket
import jobkit.cli.cancel
fcntl.flock = lambda descriptor, kind: None
socket.gethostname = lambda: "elsewhere"
jobkit.cli.cancel.KILLED_SECONDS = 1.0
"""


def from_elsewhere(project: Project) -> Project:
    """Return a user's shell on another host, in the same folder: no lock that is taken here is held there."""
    other = Project(project.folder, project.environment)
    other.begin_with("jobkit", ELSEWHERE)
    return other


def test_a_run_of_another_host_is_not_known_and_not_touched(project: Project) -> None:
    words = ("submit", str(project.yaml), "--local", "params.steps=100000", "--detach")
    project.jobkit(*words)
    launch = project.only_run().wait_for_step(25)
    name, other = launch.run.name, from_elsewhere(project)

    rows = json.loads(other.jobkit("list", "--json").stdout)
    assert [(row["state"], row["run"]) for row in rows] == [("running", name)]
    shown = json.loads(other.jobkit("status", name, "--json").stdout)
    assert (shown["state"], shown["answered"]) == ("running", False)
    assert f"on host {socket.gethostname()}, not known from here" in shown["words"]
    assert other.jobkit("wait", name, "--timeout", "1", check=False).returncode == 124
    submit = ("submit", str(project.yaml), "--local")
    acts = [words, ("resume", name), ("rm", "-y", name), ("rewind", name, "10")]
    others = [((*submit, "seed=2", "--after", name), 2), ((*words, "--sweep", "seed=0"), 75)]
    for refused, code in [*((refused, 2) for refused in acts), *others]:
        done = other.jobkit(*refused, check=False)
        assert (done.returncode, f"on host {socket.gethostname()}" in done.stderr) == (code, True), done
        assert ("cancel --no-grace" in done.stderr) == (refused in acts)
    assert launch.wait_for_step(launch.step + 20).causes == []
    assert other.jobkit("preempt", name).returncode == 0
    launch.wait_for_attempt(2)
    assert other.jobkit("cancel", name).returncode == 0
    assert launch.causes == ["preempted", "cancelled"]


def test_a_run_whose_host_is_gone_for_good_is_freed(project: Project) -> None:
    words = ("submit", str(project.yaml), "--local", "params.steps=100000", "--detach")
    project.jobkit(*words)
    launch = project.only_run().wait_for_step(25)
    other = from_elsewhere(project)
    end_processes(project.folder)  # the host
    assert other.jobkit(*words, check=False).returncode == 2
    assert other.jobkit("cancel", "--no-grace", launch.run.name).returncode == 0
    assert launch.status.state == "cancelled"
    other.jobkit(*words)
    assert launch.wait_for_attempt(2).steps_done[2][0] >= 20
