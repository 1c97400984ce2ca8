"""Stops on this machine: Ctrl-C, cancel and preempt; exit codes, and the same command continues."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from harness.runs import Launch, Project, wait_until


def foreground(project: Project, *arguments: str, **options: object) -> tuple[subprocess.Popen[str], Launch]:
    """Start a foreground run, and return its process and its run once it trains."""
    process = project.start("submit", str(project.yaml), "--local", "params.steps=100000", *arguments, **options)
    return process, project.only_run().wait_for_step(10)


def test_ctrl_c_saves_and_the_same_command_continues(project: Project) -> None:
    process, launch = foreground(project)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    assert (launch.status.state, launch.causes) == ("interrupted", ["stopped"])
    assert "jobkit stop" not in launch.status.reason, "there is no such command"
    stopped_at = launch.run.durable_step()
    assert stopped_at is not None and stopped_at >= 10

    launch.end_training()
    again = project.jobkit("submit", str(project.yaml), "--local", "params.steps=100000")
    assert again.returncode == 0
    assert launch.causes == ["stopped", "finished"]
    assert launch.status.result == {"steps": 100_000, "first": stopped_at}
    launch.assert_repeated("none")

    third = project.jobkit("submit", str(project.yaml), "--local", "params.steps=100000")
    assert "finished" in third.stdout + third.stderr
    assert len(launch.ends) == 2


def stop_and_resume(project: Project) -> tuple[Launch, Any]:
    """Preempted, cancelled, resumed, and cancelled without grace."""
    where = ("--local", "--detach", "--json", "params.steps=100000", "+params.save_seconds=2")
    submitted = json.loads(project.jobkit("submit", str(project.yaml), *where).stdout)
    launch = project.launch(submitted["dir"])
    trains_on = launch.run.alive_lock().is_held()
    launch.wait_for_step(10)
    project.jobkit("preempt", launch.run.name)
    launch.wait_for_attempt(2).wait_for_step(30)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the job script to end")
    resumed = json.loads(project.jobkit("resume", launch.run.name, "--json").stdout)
    launch.wait_for_attempt(3)
    project.jobkit("cancel", "-y", "--no-grace", launch.run.name)
    launch.wait_until_over()
    return launch, {"submitted": submitted, "trains on": trains_on, "resumed": resumed}


@pytest.fixture(scope="session")
def stopped(seen_once: Callable[..., tuple[Launch, Any]]) -> tuple[Launch, Any]:
    return seen_once("stopped-here", stop_and_resume)


def test_a_detached_submission_returns_while_the_run_lives(stopped: tuple[Launch, Any]) -> None:
    launch, seen = stopped
    assert seen["trains on"]
    assert len(launch.ends) == 3


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_the_answer_in_json(stopped: tuple[Launch, Any], verb: str) -> None:
    launch, seen = stopped
    answer = seen["submitted" if verb == "submit" else "resumed"]
    assert (answer["run"], answer["dir"], answer["started"]) == (launch.run.name, str(launch.run.path), True)


@pytest.mark.parametrize(
    ("attempt", "cause", "how"), [(1, "preempted", "in place"), (2, "cancelled", "resume")], ids=["preempt", "cancel"]
)
def test_a_stop_repeats_no_step(stopped: tuple[Launch, Any], attempt: int, cause: str, how: str) -> None:
    """`preempt` continues by itself, and `cancel` does not."""
    launch, _ = stopped
    ended, done = launch.ends[attempt - 1], launch.steps_done
    assert (ended.cause, launch.status.attempts[attempt].began.how) == (cause, how)
    assert done[attempt][-1] + 1 == ended.durable_step == done[attempt + 1][0]


def test_without_grace_nothing_is_saved(stopped: tuple[Launch, Any]) -> None:
    launch, _ = stopped
    assert (launch.status.state, launch.causes[2]) == ("cancelled", "cancelled")
    due = {step + 1 for step in launch.steps_done[3] if (step + 1) % 10 == 0}
    assert launch.run.durable_step() in {launch.ends[1].durable_step, *due}


def test_a_time_limit_on_this_machine_ends_an_attempt_and_the_next_one_continues(project: Project) -> None:
    launch = project.submit("--local", "--detach", "resources.time=20s", steps=100_000)
    launch.wait_for_attempt(2).end_training().wait_until_over()
    first, second = launch.ends[:2]
    assert (launch.status.state, first.cause, first.next) == ("finished", "timeout", "in_place")
    assert second.first_step == first.durable_step is not None


def test_a_moved_project_resumes(project: Project) -> None:
    launch = project.submit("--local", "--detach", steps=100_000).wait_for_step(10)
    project.jobkit("cancel", "-y", launch.run.name)
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the job script to end")
    moved = Project(project.folder.with_name("moved"), project.environment)
    (project.folder / "runs").rename(moved.folder / "runs")
    shutil.rmtree(project.folder)
    again = moved.launch(moved.folder / "runs" / launch.run.name)
    assert str(project.folder) in moved.jobkit("resume", launch.run.name, "--detach").stderr
    again.wait_for_attempt(2).end_training().wait_until_over()
    assert again.causes == ["cancelled", "finished"]


def test_a_save_that_makes_progress_is_waited_for(project: Project) -> None:
    """The time of a save counts from its last progress; here it is 5 s, for a save of 10 and for one without end."""
    project.begin_with(
        "jobkit.supervisor.main", "from jobkit.supervisor import allocation\nallocation.MARGIN_SECONDS = 5"
    )
    for word, is_saved in {"write_seconds=10": True, "save_waits=true": False}.items():
        # The only checkpoint is that of the stop.
        words = ("--local", "--detach", f"+params.{word}", "+params.every=1000000")
        launch = project.submit(*words, steps=100_000).wait_for_step(20)
        project.jobkit("cancel", "-y", launch.run.name)
        done, saved = launch.steps_done[1][-1] + 1, launch.run.durable_step()
        assert (launch.status.state, saved == done) == ("cancelled", is_saved)
