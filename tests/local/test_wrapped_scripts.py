"""A script with jobkit.init that a shell, another Python or torchrun starts is stopped as if it were the command."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness.processes import processes_of
from harness.project import Project, assert_each_step_once, causes, describe, events, is_over, status, step, wait_for
from slurm_cluster import Cluster

TRAIN = """\
import jobkit
import mytask

ctx = jobkit.init()
ctx.finish(mytask.train(ctx))
"""

ORDERS = """\
import time

from jobkit.worker.stop import STOP_SIGNALS


def at_step(ctx, step):
    while ctx.attempt <= LAST and step == 20 + ctx.attempt and not STOP_SIGNALS.pending:
        time.sleep(0.02)
"""

SHELL = 'trap "rm -f $JOBKIT_RUN/temporary" EXIT\npython train.py | cat\nsleep 600\n'
LAUNCH = "import subprocess, sys, time\nsubprocess.call([sys.executable, 'train.py'])\ntime.sleep(600)\n"

WRAPPERS = {
    "shell": ["bash", "run.sh"],
    "python": ["python", "launch.py"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node=1", "train.py"],
}

SILENT = """\
import os, time
from pathlib import Path

Path(os.environ["JOBKIT_RUN"], f"pid_{os.environ['JOBKIT_ATTEMPT']}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    for name, text in {"train.py": TRAIN, "run.sh": SHELL, "plain.sh": "python silent.py\necho done\n"}.items():
        (made.path / name).write_text(text)
    (made.path / "launch.py").write_text(LAUNCH)
    (made.path / "silent.py").write_text(SILENT)
    (made.path / "toy.yaml").write_text(
        "name: toy\ncommand: [bash, run.sh]\nparams: {steps: 30}\ncheckpoint: {every: 1000, memory: off}\n"
        "resources: {nodes: 1, tasks_per_node: 1, time: '0:05:00'}\nclusters: {slurm: {partition: low}}\n"
    )
    return made


def reach(run: Path, attempt: int) -> str:
    """Wait until an attempt stands still; the id of its job."""

    def reached() -> bool:
        assert not is_over(run), describe(run)
        return len(status(run).get("attempts", [])) == attempt and step(run) >= 20 + attempt

    wait_for(f"attempt {attempt}", reached, run)
    return str(status(run)["job_id"])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_script_saves_when_its_local_run_is_stopped(project: Project, wrapper: str) -> None:
    (project.path / "orders.py").write_text(ORDERS.replace("LAST", "1"))
    command = f"command=[{', '.join(WRAPPERS[wrapper])}]"
    with project.start("submit", "toy.yaml", "--local", command) as process:
        wait_for("a run", lambda: project.runs)
        (run,) = project.runs
        reach(run, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 75, describe(run)
    assert causes(run) == ["user"], describe(run)
    assert status(run)["checkpoint"] == status(run)["step"] > 20
    if wrapper == "torchrun":
        project.submit("--local", command)
        assert_each_step_once(run, 30, ranks=1)
    assert not processes_of(run)


@pytest.mark.parametrize("wrapper", ["shell", "torchrun"])
def test_a_wrapped_script_saves_when_slurm_stops_it(project: Project, slurm: Cluster, wrapper: str) -> None:
    (project.path / "orders.py").write_text(ORDERS.replace("LAST", "2"))
    project.env.update(slurm.env)
    project.submit("--cluster", "slurm", f"command=[{', '.join(WRAPPERS[wrapper])}]")
    (run,) = project.runs
    slurm.command("scancel", "--signal=USR2", reach(run, 1))  # as at the time limit
    slurm.preempt(reach(run, 2))
    wait_for("a third attempt", lambda: len(status(run)["attempts"]) == 3, run)
    attempts = status(run)["attempts"]
    assert [one["cause"] for one in attempts[:2]] == ["signal", "preempted"], describe(run)
    ends = [event for event in events(run) if event["event"] == "interrupted"]
    assert [one["step"] for one in ends] == [one["reached"] for one in ends] == [22, 23], describe(run)
    project.jobkit("cancel", run.name, "--no-grace")


def test_what_a_shell_has_started_does_not_outlive_its_run(project: Project) -> None:
    command = ("--local", "--detach", "command=[bash, plain.sh]")
    project.submit(*command)
    (run,) = project.runs
    wait_for("its start", (run / "pid_1").exists, run)
    os.kill(int(status(run)["job_id"]), signal.SIGKILL)
    wait_for("its end", lambda: not processes_of(run), run, 60)
    project.submit(*command)
    wait_for("its start", (run / "pid_2").exists, run)
    project.jobkit("cancel", run.name)
    wait_for("its end", lambda: not processes_of(run), run, 60)
