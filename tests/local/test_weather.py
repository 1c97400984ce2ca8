"""Bad weather on this machine: outages end, and the run has the bits of a run that has seen none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness.runs import Launch, Project, wait_until
from harness.training import result
from harness.weather import be, with_task

from jobkit.errors import EXIT_FAILED, EXIT_RESUMABLE

THREE = ("--local", "--detach", "resources.tasks_per_node=3")


def train_in_fine_weather(project: Project) -> tuple[Launch, Any]:
    launch = with_task(project).submit(*THREE)
    return launch, result(launch)


@pytest.fixture(scope="session")
def fine(seen_once: Callable[..., tuple[Launch, Any]]) -> Any:
    """The result of three ranks in fine weather."""
    return seen_once("fine-weather", train_in_fine_weather)[1]


@pytest.mark.parametrize("kind", ["write", "read in a worker"])
def test_an_outage_of_150_seconds_is_waited_for(project: Project, fine: Any, kind: str) -> None:
    """Of a thirtieth of that at least, and of four deaths."""
    kind, _, where = kind.partition(" ")
    launch = with_task(project).submit(*THREE, workers=2 if where else 0).wait_for_step(40)
    be(launch, kind)
    since = time.monotonic()
    shown = wait_until(lambda: words_of_a_pause(launch), "a pause")
    assert re.match(r"try \d+ at \d\d:\d\d:\d\d, given up at \d\d:\d\d:\d\d without progress: crashed: rank", shown)
    if where:  # a preemption in the middle
        project.jobkit("preempt", "-y", launch.run.name, check=False)  # an attempt may just have died
    launch.wait_until(lambda me: me.causes.count("crashed") >= 4 and time.monotonic() > since + 5, "more deaths")
    (project.folder / "weather").unlink()
    assert result(launch) == fine
    assert set(launch.causes) <= {"crashed", "preempted", "finished"}
    assert {end.nature for end in launch.ends if end.cause == "crashed"} == {"outside"}


def words_of_a_pause(launch: Launch) -> str:
    """What `status` says while the run waits for its next try."""
    words = json.loads(launch.project.jobkit("status", launch.run.name, "--json").stdout)["words"]
    return words if "without progress" in words else ""


def test_an_outage_that_does_not_end_interrupts_the_run_and_the_same_command_continues_it(project: Project) -> None:
    words = ("submit", str(with_task(project).yaml), "--local", "retry.patience=3s")
    process = project.start(*words)
    launch = project.only_run().wait_for_step(40)
    be(launch, "bucket")
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == EXIT_RESUMABLE and launch.status.state == "interrupted"
    assert "gave up after" in launch.status.reason and "cannot reach the bucket" in launch.status.reason
    assert "given up at" in shown and "gave up after" in shown
    tries = len(launch.ends)
    assert tries >= 4
    assert project.jobkit(*words, check=False).returncode == EXIT_RESUMABLE
    assert len(launch.ends) == tries + 1, "a submission has one try until the run makes progress"
    (project.folder / "weather").unlink()
    project.jobkit(*words)
    assert launch.status.state == "finished"


def test_a_typo_at_the_step_of_a_checkpoint_fails_with_the_reason(project: Project) -> None:
    project.write("weather", json.dumps({"kind": "typo"}))
    done = project.jobkit("submit", str(with_task(project).yaml), "--local", "retry.patience=20s", check=False)
    launch = project.only_run()
    assert done.returncode == EXIT_FAILED and [end.step for end in launch.ends] == [100, 100, 100]
    newest, older = (end.first_step for end in launch.ends[1:])
    assert newest in (None, 100), "a checkpoint of that step proves nothing"
    assert older is not None and 50 <= older < 100
    said = "restarts are exact, and this was FileNotFoundError at weather_task.py:"
    assert said in done.stdout + done.stderr and "validatoin.bin" in done.stdout + done.stderr


def test_cancel_and_ctrl_c_act_at_once_in_a_pause(project: Project) -> None:
    launch = with_task(project).submit(*THREE, "retry.patience=1h").wait_for_step(40)
    be(launch, "bucket")
    launch.wait_until(
        lambda me: me.status.is_over or (me.ends[-1:] and me.ends[-1].tries >= 4),
        "a pause of 15 s",
    )
    number, next_at = len(launch.ends), launch.ends[-1].next_at
    assert next_at is not None
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    assert launch.status.state == "cancelled" and launch.status.since < next_at
    assert len(launch.ends) <= number + 1
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the job to end")
