"""Pauses between two attempts: what only the agents' memory holds is on the disk before they may be gone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from conftest import pids
from harness.pauses import SHORT, YAML, fail_at, failing_project, wait_for_pause
from harness.runs import Launch, Project, parent_of, wait_until

FOREGROUND = ("submit", "exp.yaml", "--local", "resources.nodes=3")


def agent_pids(launch: Launch) -> list[int]:
    """Return the process of the agent, and those that it has forked."""
    words = f"jobkit.worker.agent\0{launch.run.folder}".encode()
    return sorted(pid for pid in pids() if words in command_of(pid))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_run_that_is_stopped_in_a_pause_goes_on_from_its_newest_snapshot(
    tmp_path: Path, no_process_left: None
) -> None:
    project = failing_project(Project(tmp_path / "project", None, YAML, plain=False))
    fail_at(project, step=20, pause=SHORT)
    foreground = project.start(*FOREGROUND)
    launch = project.only_run()
    wait_for_pause(launch, 2)
    assert launch.run.durable_steps() == [], "it is in memory alone"
    foreground.send_signal(signal.SIGINT)
    assert foreground.wait() == 75
    assert launch.run.durable_steps() == [20]
    assert [attempt.began.ranks for attempt in launch.status.attempts] == [3, 3, 0], "a stop in a pause has no ranks"
    saved = (launch.run.checkpoint(20) / "manifest.json").stat().st_mtime
    assert saved < launch.ends[2].time, "before the journal says that the run may be submitted again"

    fail_at(project, step=40, pause=30)  # 60 s: it is written down before anything happens
    project.jobkit(*FOREGROUND, "--detach")
    wait_for_pause(launch, 5)
    wait_until(lambda: launch.run.durable_steps() == [20, 40], "the snapshot on the disk")
    script, supervisor = parent_of(launch.supervisor_pid), launch.supervisor_pid
    for pid in (script, supervisor, *agent_pids(launch)):  # as if the machine had lost its power
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the end of the job")

    fail_at(project, step=60, pause=SHORT)
    project.jobkit(*FOREGROUND, "--detach")
    wait_for_pause(launch, 7)
    among = agent_pids(launch)
    (agent,) = (pid for pid in among if parent_of(pid) not in among)
    os.kill(agent, signal.SIGTERM)  # somebody's, or Slurm's before it says why
    wait_until(lambda: launch.run.durable_steps() == [20, 40, 60], "the snapshot on the disk")
    assert (len(launch.ends), launch.status.open_attempt) == (7, None), "it still waits"
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()

    fail_at(project, step=80)
    assert project.jobkit(*FOREGROUND, "retry.crash=0", check=False).returncode == 1
    assert launch.run.durable_steps() == [40, 60, 80]

    fail_at(project, step=-1)
    project.jobkit(*FOREGROUND)
    done = launch.steps_done.values()
    assert [step for steps in done for step in steps] == list(range(90)), "none is repeated"
    assert [steps[0] for steps in done] == [0, 20, 40, 60, 80]
    assert launch.status.result == {"sum": sum(range(90))}
