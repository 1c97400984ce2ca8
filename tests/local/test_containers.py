"""Runs in a real container on this machine: interrupted within it, and refused at once where it is not fit."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.container import PYTHON, box, outside, yaml_of
from harness.runs import YAML, Project, parent_of, wait_until
from harness.training import training_project


def test_deaths_within_a_container_cost_an_attempt_and_its_agents_may_have_equal_pids(project: Project) -> None:
    project.yaml.write_text(YAML + yaml_of(box(project.folder)))
    launch = project.submit("--local", "--detach", "resources.tasks_per_node=2", steps=100_000, every=5)
    launch.wait_for_step(12)
    os.kill(outside(launch, launch.rank_pid(1)), signal.SIGKILL)
    for number, step in ((2, 30), (3, 50)):
        launch.wait_for_attempt(number).wait_for_step(step)
        os.kill(parent_of(outside(launch, launch.rank_pid(0))), signal.SIGKILL)  # the agent
    launch.wait_for_attempt(4).wait_for_step(70)
    before, rank = launch.supervisor_pid, outside(launch, launch.rank_pid(0))
    launch.kill_supervisor()
    wait_until(lambda: launch.supervisor_pid != before, "the next supervisor")
    assert Path(f"/proc/{parent_of(rank)}/root").exists()  # the agent lives, and its rank
    project.jobkit("preempt", launch.run.name, "-y")
    launch.wait_for_attempt(5).end_training().wait_until_over()

    assert (launch.status.state, launch.causes) == ("finished", ["killed"] * 3 + ["preempted", "finished"])
    launch.assert_repeated(*["since the checkpoint"] * 3, "none")


def test_a_runtime_that_fails_for_a_moment_does_not_end_a_run_that_has_trained(project: Project) -> None:
    start = project.write("start.sh", '[ ! -e away ] || exit 255\nexec "$@"\n')
    project.yaml.write_text(YAML + yaml_of(["bash", str(start), *box(project.folder)]))
    launch = project.submit("--local", "--detach", steps=100_000, every=5).wait_for_step(12)
    (project.folder / "away").touch()
    os.kill(parent_of(outside(launch, launch.rank_pid(0))), signal.SIGKILL)
    launch.wait_until(lambda me: len(me.ends) >= 2, "an attempt without an agent")
    (project.folder / "away").unlink()
    launch.wait_until(lambda me: me.step > 0 and len(me.status.attempts) > 2, "another attempt")
    launch.end_training().wait_until_over()
    assert (launch.status.state, launch.causes[:2], launch.causes[-1]) == (
        "finished",
        ["killed", "node_failure"],
        "finished",
    )


def test_a_training_in_a_container_is_verified(tmp_path: Path) -> None:
    project = training_project(tmp_path)
    project.yaml.write_text(project.yaml.read_text() + yaml_of(box(tmp_path)))
    done = project.jobkit("verify", str(project.yaml), "--local", "--steps", "12", "--json")
    assert json.loads(done.stdout)["equal"]


UNFIT: dict[str, Callable[[Path], tuple[list[str], str]]] = {
    "no Python": lambda folder: (box(folder, python=False), PYTHON),
    "the runs directory is not mounted": lambda folder: (box(), PYTHON),
    "a Python without torch": lambda folder: (box(folder), f"{sys.base_prefix}/bin/python3"),
    "no variables": lambda folder: ([*box(folder), "--clearenv"], PYTHON),
    "the runtime refuses": lambda folder: (["false"], PYTHON),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_container_is_tried_once_and_doctor_says_the_same(project: Project, case: str) -> None:
    project.yaml.write_text(YAML + yaml_of(*UNFIT[case](project.folder)))
    launch = project.submit("--local", "--detach").wait_until_over()
    assert (launch.status.state, launch.causes) == ("failed", ["crashed"])
    assert launch.ends[0].final
    doctor = project.jobkit("doctor", str(project.yaml), "--local", check=False)
    assert (doctor.returncode == 0) == (case == "no variables")  # they belong to a job
