"""Ranks that fail start again in place: at once, with nothing of the attempt before beside them, and told exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness.processes import ranks_of
from harness.project import Project, begun, causes, describe, events, status, step, wait_for
from slurm_cluster import process_table

ONE_RANK = ("resources.nodes=1", "resources.tasks_per_node=1")


def test_what_a_killed_rank_has_started_does_not_live_on(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "orders.py").write_text(
        """\
import subprocess
import time

started = []


def at_step(ctx, step):
    time.sleep(0.1 if ctx.attempt == 1 else 0)
    if not started:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        (ctx.run_dir / f"started_{ctx.attempt}").write_text(str(started[0].pid))
"""
    )
    command = project.start("submit", "toy.yaml", "--local", *ONE_RANK)
    wait_for("step 6", lambda: project.runs and step(project.runs[0]) >= 6)
    (run,) = project.runs
    os.kill(ranks_of(run, 1)[0].pid, signal.SIGKILL)
    assert command.wait() == 0
    assert causes(run) == ["killed", "finished"]
    of_the_killed, of_the_finished = (int((run / f"started_{number}").read_text()) for number in (1, 2))
    assert of_the_killed not in process_table()
    os.kill(of_the_finished, signal.SIGKILL)  # what a rank leaves that has returned is the user's


def test_a_rank_that_has_failed_ends_although_a_thread_of_it_goes_on(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "orders.py").write_text(
        """\
import threading


def at_step(ctx, step):
    if step == 8 and ctx.attempt == 1:
        threading.Thread(target=threading.Event().wait).start()
        if ctx.rank == 0:
            raise ValueError("mine")
"""
    )
    project.submit("--local", "resources.nodes=1", "resources.tasks_per_node=2", "watchdog=10min")
    (run,) = project.runs
    assert causes(run) == ["crashed", "finished"], describe(run)
    assert "mine" in status(run)["attempts"][0]["failure"]["error"]


def test_each_step_that_is_repeated_is_told_however_a_rank_dies(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "orders.py").write_text(
        """\
import os


def at_step(ctx, step):
    if step == 33 and ctx.attempt == 1:
        os._exit(9)
"""
    )
    project.submit("--local", *ONE_RANK, "checkpoint.every=20", "checkpoint.memory=off")
    (run,) = project.runs
    (resumed,) = [event["step"] for event in events(run) if event["event"] == "resumed" and event["attempt"] == 2]
    steps = [one["step"] for one in begun(run, 0)]
    repeated = sorted({one for one in steps if steps.count(one) > 1} - {33})  # which was not done
    assert repeated == list(range(resumed, 33))
    assert status(run)["attempts"][0]["last_step"] == 33, describe(run)
    assert f"{33 - resumed} steps repeated" in project.jobkit("status", run.name).stdout


def test_a_step_that_always_fails_ends_the_run_although_each_attempt_begins_later(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "orders.py").write_text(
        """\
import os


def at_step(ctx, step):
    ctx._checkpointer.wait()  # for the snapshot of the step before
    if step == 33:
        os._exit(9)
"""
    )
    every = ("checkpoint.every=1000", "checkpoint.memory=10", "retry.exclude_after=1000")
    project.submit("--local", *ONE_RANK, *every, expect=1)
    (run,) = project.runs
    assert status(run)["state"] == "failed"
    assert causes(run) == ["crashed"] * 4, "three without progress, after the first, which left a snapshot"


def test_a_command_that_dies_starts_again_in_place_as_a_new_program(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "script.py").write_text(
        """\
import os
import sys
from pathlib import Path

assert "torch" not in sys.modules  # a program of its own, not a fork of what has imported it
with Path(os.environ["SEEN"]).open("a") as seen:
    seen.write(f"{os.environ['JOBKIT_ATTEMPT']} {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n")
if os.environ["JOBKIT_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    os._exit(9)
"""
    )
    yaml = (project.path / "toy.yaml").read_text().replace("task: mytask:train", "command: [python, script.py]")
    (project.path / "toy.yaml").write_text(yaml)
    project.env["SEEN"] = str(tmp_path / "seen")
    project.submit("--local", "resources.nodes=1", "resources.tasks_per_node=2")
    (run,) = project.runs
    assert [one["began"] for one in status(run)["attempts"]] == ["submitted", "in place"], describe(run)
    second = sorted(line for line in (tmp_path / "seen").read_text().splitlines() if line[0] == "2")
    assert second == ["2 0 2", "2 1 2"]
