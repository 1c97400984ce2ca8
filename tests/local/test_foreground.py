"""The foreground command before an attempt has begun, and with a terminal that goes away."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from harness.runs import Project, wait_until


def test_ctrl_c_ends_setup_lines_and_the_same_command_starts_the_run(project: Project) -> None:
    words = ("submit", str(project.yaml), "--local", "params.steps=5", "+clusters.local.setup=[touch here; sleep 600]")
    process = project.start(*words)
    wait_until((project.folder / "here").exists, "the setup line")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    launch = project.only_run()
    assert (launch.status.state, launch.causes) == ("interrupted", ["stopped"])
    assert not launch.run.alive_lock().is_held()
    assert project.jobkit(*words[:-1]).returncode == 0
    assert launch.causes == ["stopped", "finished"]
    with Path("/dev/full").open("w") as full:  # it has started a run, and cannot say so where it should
        process = project.start(*words[:-1], "--fresh", stdout=full, stderr=subprocess.PIPE)
        _, said = process.communicate()
    fresh = launch.project.launch(launch.run.path.with_name(f"{launch.run.name}-2")).wait_until_over()
    assert (process.returncode, f"{fresh.run.name} has started" in said, "Traceback" in said) == (1, True, False), said
    assert (fresh.causes, len(launch.ends)) == (["finished"], 2)


def test_a_run_that_waits_for_a_device_leaves_the_line(project: Project, tmp_path: Path) -> None:
    project.environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": "0"}
    one_device = "resources.gpus_per_task=1"
    first = project.submit("--local", "--detach", one_device, steps=100_000).wait_for_step(2)
    process = project.start("submit", str(project.yaml), "--local", "params.steps=5", one_device)
    assert process.stdout is not None
    wait_until(lambda: "cuda 0" in process.stdout.readline(), "its place in the line")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    second = project.only_run(first)
    assert second.status.state == "interrupted"
    assert set(second.causes) <= {"stopped"}
    project.jobkit("cancel", "-y", first.run.name)
    assert project.jobkit("submit", str(project.yaml), "--local", "params.steps=5", one_device).returncode == 0
    assert second.status.state == "finished"


@pytest.mark.parametrize("end", ["Ctrl-C behind | tee", "a closed terminal"])
def test_a_terminal_that_takes_no_more_output_stops_the_run(project: Project, end: str) -> None:
    """Ctrl-C ends tee too, and a closed terminal takes no words: the run hears of it all the same."""
    terminal, inner = pty.openpty()
    pipe = " 2>&1 | tee log.txt" if "tee" in end else ""
    command = f"{shlex.join(project.words('submit', str(project.yaml), '--local', 'params.steps=100000'))}{pipe}"
    shell = subprocess.Popen(
        ["setsid", "--ctty", "bash", "-c", command],
        cwd=project.folder,
        env=project.environment,
        stdin=inner,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    launch = project.only_run().wait_for_step(5)
    if pipe:
        os.write(terminal, b"\x03")
    else:
        os.close(terminal)
    launch.wait_until_over()
    assert launch.causes == ["stopped"]
    shell.wait()
