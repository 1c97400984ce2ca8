"""Pauses between two attempts: what only the agents' memory holds is on the disk before they may be gone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from conftest import pids
from harness.pauses import SHORT, YAML, fail_at, failing_project, wait_for_pause
from harness.runs import Launch, Project, parent_of, wait_until

from jobkit.run.journal import events

FOREGROUND = ("submit", "exp.yaml", "--local", "resources.nodes=3")

BEGINS_LATE = """\
import os, time
from jobkit.supervisor import attempt
begin = attempt.begin
def begin_late(held, *words, **options):
    while held.this_job.began(held.journal.status.attempt) and not held.run.request_file("cancel").exists():
        time.sleep(0.01)
    return begin(held, *words, **options)
if os.environ.get("BEGINS_LATE"):
    attempt.begin = begin_late
"""
"""The next attempt of a job begins as a cancel comes: the supervisor has looked for one before."""

DIES = """\
import os
from jobkit.supervisor import attempt
close = attempt.close
def close_later(held_lease, *words, is_saved):
    died = held_lease.run.outputs / "supervisor died"
    if is_saved and os.environ.get("DIES") and not died.exists():
        died.touch()
        os._exit(1)
    return close(held_lease, *words, is_saved=is_saved)
attempt.close = close_later
"""
"""A supervisor dies once it has the newest snapshot saved, before it journals the end."""


def agent_pids(launch: Launch) -> list[int]:
    """Return the process of the agent, and those that it has forked."""
    words = f"jobkit.agent.agent\0{launch.run.folder}".encode()
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
    assert saved < launch.status.attempts[2].began.time

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

    project.begin_with("jobkit.supervisor.main", DIES)
    project.environment["DIES"] = "1"
    fail_at(project, step=80)
    assert project.jobkit(*FOREGROUND, "retry.crash=0", check=False).returncode == 1
    assert launch.run.durable_steps() == [40, 60, 80]
    assert (launch.run.outputs / "supervisor died").exists()
    end = launch.ends[-1]
    assert (end.cause, end.snapshot_step) == ("crashed", 80), "the next supervisor has heard how the ranks ended"

    fail_at(project, step=-1)
    project.jobkit(*FOREGROUND)
    done = launch.steps_done.values()
    assert [step for steps in done for step in steps] == list(range(90)), "none is repeated"
    assert [steps[0] for steps in done] == [0, 20, 40, 60, 80]
    assert launch.status.result == {"sum": sum(range(90))}


def test_a_command_names_the_newest_snapshot_of_ranks_that_have_just_died(
    tmp_path: Path, no_process_left: None
) -> None:
    project = failing_project(Project(tmp_path / "project", None, YAML, plain=False))
    project.begin_with("jobkit.supervisor.main", BEGINS_LATE)
    used = project.folder / "fault.used"
    fail_at(project, step=20, request="preempt")
    project.jobkit(*FOREGROUND, "--detach")
    launch = project.only_run()
    wait_until(used.exists, "the fault")
    assert "from step 20 or later" in project.jobkit("preempt", "-y", launch.run.name).stdout

    def assert_cancelled_after_the_save_of(step: int) -> None:
        said = project.jobkit("cancel", "-y", launch.run.name).stdout
        saved = (launch.run.checkpoint(step) / "manifest.json").stat().st_mtime
        *_, cancelled = events(launch.run)
        assert (cancelled.kind, f"the checkpoint of step {step} is kept" in said) == ("cancelled", True), said
        assert saved < cancelled.time, "before the journal says that the run may be submitted again"
        wait_until(lambda: not launch.run.alive_lock().is_held(), "the end of the job")

    fail_at(project, step=40, request="cancel")  # they have died, and their end is not in the journal
    wait_until(used.exists, "the fault")
    assert_cancelled_after_the_save_of(40)

    project.environment["BEGINS_LATE"] = "1"
    fail_at(project, step=60)  # it is, and the next ones do not live yet
    project.jobkit(*FOREGROUND, "--detach")
    wait_until(lambda: launch.causes[-1] == "crashed" and launch.status.open_attempt is None, "the end of the attempt")
    assert_cancelled_after_the_save_of(60)

    project.environment["BEGINS_LATE"] = ""
    fail_at(project, step=-1)
    project.jobkit(*FOREGROUND)
    done = launch.steps_done.values()
    assert [step for steps in done for step in steps] == list(range(90)), "none is repeated"
    assert [steps[0] for steps in done] == [0, 20, 40, 60]
