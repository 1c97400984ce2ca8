"""A sweep here: its runs in turn, stopped by one Ctrl-C, cancelled by its name, finished by the same command."""

from __future__ import annotations

import signal

from harness.runs import Launch, Project, wait_until

from jobkit.run.rundir import RunDir
from jobkit.run.runs import find, runs_in, sweep_lock

SWEEP = ("--local", "params.steps=100000", "--sweep", "seed=0,1,2")


def test_a_sweep_goes_on_in_turn_is_interrupted_and_the_same_command_finishes_it(project: Project) -> None:
    runs = project.folder / "runs"
    process = project.start("submit", str(project.yaml), *SWEEP)
    first = project.only_run().wait_for_step(10).end_training().wait_until_over()
    second = wait_until(lambda: [run for run in runs_in(runs) if run.name != first.run.name], "the second run")
    Launch(project, second[0]).wait_for_step(10)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    states = sorted(Launch(project, run).status.state for run in runs_in(runs))
    assert states == ["finished", "interrupted"], "the third one was not started"

    (file,) = runs.glob("*.sweep")
    project.jobkit("submit", str(project.yaml), *SWEEP, "--detach")
    Launch(project, second[0]).wait_for_attempt(2)
    project.jobkit("cancel", "-y", file.name)
    wait_until(lambda: not sweep_lock(file).is_held(), "the end of the loop")
    assert Launch(project, second[0]).status.state == "cancelled"
    assert len(find([file.name], runs)) == 2, "a cancelled sweep starts nothing more"

    detached = project.jobkit("submit", str(project.yaml), *SWEEP, "--max-running", "2", "--detach")
    assert file.name in detached.stdout
    wait_until(lambda: len(find([file.name], runs)) == 3, "the third run")
    early = project.jobkit("wait", file.name, "--timeout", "1", check=False)
    assert early.returncode == 124, "the loop may start more runs"
    for run in find([file.name], runs):
        Launch(project, RunDir(run.path)).wait_for_step(10).end_training()
    assert project.jobkit("wait", file.name).returncode == 0
    assert Launch(project, second[0]).causes == ["stopped", "cancelled", "finished"]
