"""Failures on this machine: hangs, memory, exceptions that repeat, ranks that obey nothing, full disks."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Launch, Project, is_alive, wait_until, with_params
from harness.small_disk import SmallDisk

from jobkit.errors import EXIT_BAD_INPUT


def fail_in_all_ways(project: Project) -> tuple[Launch, Any]:
    """A hang, memory, exit codes; then an exception at the same step twice."""
    faults = [
        {"kind": "hang", "rank": 0, "step": 6, "attempt": 1},
        {"kind": "memory", "rank": 1, "step": 16, "attempt": 2},
        {"kind": "4", "rank": 1, "step": 26, "attempt": 3},
        {"kind": "exit", "rank": 1, "step": 36, "attempt": 4},
        *({"kind": "raise", "rank": 0, "step": 56, "attempt": attempt} for attempt in (5, 6)),
    ]
    params = with_params({"steps": 1000, "every": 5, "faults": faults})
    watchdog = "watchdog=10s"  # a rank that waits for a processor, or a slow disk, for some seconds does not hang
    words = ("submit", str(project.yaml), "--local", "resources.tasks_per_node=2", watchdog)
    done = project.jobkit(*words, *params, check=False)
    launch = project.only_run()
    return launch, [done.returncode, project.jobkit("status", launch.run.name).stdout]


@pytest.fixture(scope="session")
def failed(seen_once: Callable[..., tuple[Launch, Any]]) -> tuple[Launch, Any]:
    """The run, the exit code of its command, and the words of `status`."""
    return seen_once("failed-here", fail_in_all_ways)


FAILURES = {
    "hang": (1, "hang", 0),
    "out of memory": (2, "out_of_memory", 1),
    "exit code": (3, "crashed", 1),
    "exit code 0 in a step": (4, "crashed", 1),
    "exception": (5, "crashed", 0),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_after_a_failure_all_start_again_at_the_checkpoint(failed: tuple[Launch, Any], kind: str) -> None:
    launch, _ = failed
    number, cause, rank = FAILURES[kind]
    ended = launch.ends[number - 1]
    assert (ended.cause, ended.rank, ended.next) == (cause, rank, "in_place")
    launch.assert_repeated(*["since the checkpoint"] * (len(launch.steps_done) - 1))  # rank 1 may fail before it starts


def test_a_hang_leaves_the_stacks_of_all_ranks(failed: tuple[Launch, Any]) -> None:
    stacks = [failed[0].run.rank_log(1, rank, "err").read_text() for rank in range(2)]
    assert all("scripted_rank.py" in text and "train" in text for text in stacks)


def test_a_step_that_always_fails_ends_the_run(failed: tuple[Launch, Any]) -> None:
    launch, (code, _) = failed
    last = launch.ends[-1]
    assert (code, launch.status.state, last.next) == (1, "failed", "fail")
    assert (last.error, last.step) == ("rank 0: ValueError: a fault of the script", 56)
    assert [launch.steps_done[attempt][-1] for attempt in (5, 6)] == [55, 55]


def test_status_names_the_line_that_failed(failed: tuple[Launch, Any]) -> None:
    _, (_, shown) = failed
    assert "scripted_rank.py" in shown and "a fault of the script" in shown


BROKEN = """
import time
def train(rank):
    open("tried", "a").write("x")
    while len(open("tried").read()) < 2 * rank.attempt:  # a rank that has not begun 3 s after an error has none
        time.sleep(0.02)
    raise ValueError("no such dataset")
"""


def test_an_error_of_all_ranks_before_the_first_step_is_tried_twice(project: Project) -> None:
    project.write("broken.py", BROKEN)
    words = ("submit", str(project.yaml), "--local", "task=broken:train", "resources.tasks_per_node=2")
    assert project.jobkit(*words, check=False).returncode == 1
    launch = project.only_run()
    assert launch.causes == ["crashed"] * 2
    assert (project.folder / "tried").read_text() == "xxxx", "each rank twice"
    assert [(end.next, end.everywhere) for end in launch.ends] == [("in_place", True), ("fail", True)]
    assert "no such dataset" in str(launch.ends[0].traceback)


def test_a_second_ctrl_c_kills_a_rank_that_ignores_the_first(project: Project) -> None:
    words = ("submit", str(project.yaml), "--local", "params.steps=100000", "+params.ignores_stop=true")
    process = project.start(*words)
    launch = project.only_run().wait_for_step(10)
    rank, page = launch.rank_pid(0), launch.page(0)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: page.stop_asked, "the rank to be asked to stop")
    launch.wait_for_step(launch.step + 20)  # it ignores that
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    request = launch.run.request("stop")
    assert request is not None and request.grace == 0.0
    assert not is_alive(rank)
    assert (launch.status.state, launch.causes) == ("interrupted", ["stopped"])


CONFIG_IS_STALE = """
import errno, os, pathlib
read_text = pathlib.Path.read_text
def stale(file, **options):
    if file.name == "config.yaml" and os.path.exists("stale"):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))
    return read_text(file, **options)
pathlib.Path.read_text = stale
"""


def test_a_supervisor_whose_config_is_away_or_of_another_jobkit_goes_on(project: Project) -> None:
    project.begin_with("jobkit.supervisor.main", CONFIG_IS_STALE)
    launch = project.submit("--local", "--detach", steps=100_000).wait_for_step(10)
    with launch.run.config_file.open("a") as file:
        file.write("verify_every: 10\n")
    refused = project.jobkit("submit", str(launch.run.config_file), "--local", check=False)
    assert (refused.returncode, "verify_every" in refused.stderr) == (EXIT_BAD_INPUT, True)
    project.write("stale", "")
    before, step = launch.supervisor_pid, launch.step
    launch.kill_supervisor()
    wait_until(lambda: "waiting for the disk" in launch.run.job_log.read_text(), "the next supervisor")
    launch.wait_for_step(step + 20)
    (project.folder / "stale").unlink()
    wait_until(lambda: launch.supervisor_pid != before, "the next supervisor's lease")
    launch.end_training().wait_until_over()
    assert (launch.status.state, launch.causes) == ("finished", ["finished"])
    assert "not keys of this jobkit, and ignored: verify_every" in launch.run.job_log.read_text()


NOTES_THAT_IT_WAITS = """
from jobkit.cli import wait
ended = wait.ended
def noted(*words, **options):
    open("waits", "w").close()
    return ended(*words, **options)
wait.ended = noted
"""


def test_a_runs_directory_that_is_gone_for_some_seconds_takes_no_run(project: Project, tmp_path: Path) -> None:
    """As an automounter's, or after a lazy umount: there is an empty folder meanwhile."""
    real, runs = tmp_path / "real", project.folder / "runs"
    real.mkdir()
    runs.mkdir()
    if subprocess.run(["mount", "--bind", str(real), str(runs)], capture_output=True).returncode:
        pytest.skip("only root can mount")
    try:
        two = "resources.tasks_per_node=2"
        # Without a checkpoint: rank 0 would look there for its lease, and end of that before it is killed.
        launch = project.submit("--local", "--detach", two, steps=100_000, every=100_000).wait_for_step(20)
        project.begin_with("wait", NOTES_THAT_IT_WAITS)
        waiting = project.start("wait", launch.run.name)
        wait_until((project.folder / "waits").exists, "the command to know the run")
        supervisor, page = launch.supervisor_pid, launch.page(1)
        subprocess.run(["umount", "--lazy", str(runs)], check=True)
        step = page.read().step
        launch_again = project.launch(real / launch.run.name)
        launch_again.kill_rank(0)
        said = launch_again.run.job_log
        wait_until(lambda: "waiting for the disk" in said.read_text(), "the end that cannot be journalled")
        subprocess.run(["mount", "--bind", str(real), str(runs)], check=True)
        launch.wait_for_attempt(2).wait_for_step(step)
        assert (launch.supervisor_pid, launch.causes, waiting.poll()) == (supervisor, ["killed"], None)
        launch.end_training().wait_until_over()
        assert (launch.status.state, waiting.wait()) == ("finished", 0)
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=False)


@pytest.fixture
def disk(project: Project) -> Iterator[SmallDisk]:
    """The runs directory of the project, as a disk of its own."""
    with SmallDisk(project.folder / "runs") as disk:
        yield disk


def test_a_job_whose_disk_takes_no_line_ends_at_once_and_says_so(project: Project, disk: SmallDisk) -> None:
    project.begin_with("jobkit.supervisor.main", "from jobkit import disk\ndisk.FULL_DISK_SECONDS = 2.0\n")
    words = ("--local", "--detach", "--notify", 'echo "$JOBKIT_STATE" >>told')
    launch = project.submit(*words, steps=100_000).wait_for_step(20)
    disk.fill()
    launch.kill_rank(0)
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the end of the job")
    assert (project.folder / "told").read_text() == "interrupted\n", "one supervisor was enough"
    disk.empty()
    launch = project.submit("--local", "--detach", steps=100_000).wait_for_attempt(2).end_training().wait_until_over()
    assert (launch.status.state, launch.causes[1:]) == ("finished", ["finished"])


def test_training_goes_on_while_the_disk_is_full_and_the_journal_catches_up(project: Project, disk: SmallDisk) -> None:
    launch = project.submit("--local", "--detach", "resources.tasks_per_node=2", steps=100_000)
    launch.wait_for_step(20)
    rank, page = launch.rank_pid(0), launch.page(1)
    disk.fill()
    step = page.read().step
    launch.kill_supervisor()
    wait_until(lambda: page.read().step >= step + 250, "rank 1 to train on")
    assert launch.run.alive_lock().is_held(), "the next supervisor waits"
    before = launch.supervisor_pid
    disk.empty()
    wait_until(lambda: launch.supervisor_pid != before, "the next supervisor")
    launch.wait_for_step(launch.step + 10)
    disk.fill()
    launch.kill_rank(1)  # its end cannot be journalled, nor the next attempt begin
    wait_until(lambda: not is_alive(rank), "the other rank to be ended")
    assert launch.causes == []
    disk.empty()
    launch.wait_for_attempt(2).end_training().wait_until_over()

    assert (launch.status.state, launch.causes) == ("finished", ["killed", "finished"])
    events = [json.loads(line) for line in launch.run.journal_file.read_text().splitlines() if "noise" not in line]
    assert [event["event"] for event in events] == [
        *("submitted", "attempt began", "attempt ended"),
        *("attempt began", "attempt ended", "finished"),
    ]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)

    wait_until(lambda: not launch.run.alive_lock().is_held(), "the job script to end")
    disk.make_read_only()
    assert launch.run.name in project.jobkit("list").stdout
    assert "finished" in project.jobkit("status", launch.run.name).stdout
    refused = project.jobkit("submit", str(project.yaml), "--local", "params.steps=7", check=False)
    assert refused.returncode == EXIT_BAD_INPUT
    assert len(refused.stderr.splitlines()) <= 2 and "Traceback" not in refused.stderr
