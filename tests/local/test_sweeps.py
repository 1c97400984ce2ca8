"""A sweep here: its runs in turn, stopped by one Ctrl-C, cancelled by its name, finished by the same command."""

from __future__ import annotations

import json
import signal

from harness.runs import Launch, Project, wait_until, with_params

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


def test_a_sweep_that_was_cancelled_and_still_ends_starts_nothing_and_says_so(project: Project) -> None:
    sweep = [*SWEEP[:1], *with_params({"steps": 100_000, "save_waits": True}), *SWEEP[2:], "--detach"]
    project.jobkit("submit", str(project.yaml), *sweep)
    first = project.only_run().wait_for_step(5)
    running = project.jobkit("submit", str(project.yaml), *sweep)
    assert (running.returncode, "runs here already" in running.stderr) == (0, True)
    (file,) = (project.folder / "runs").glob("*.sweep")
    cancel = project.start("cancel", file.name)
    first.wait_until(lambda me: me.run.request("cancel"), "the cancel")
    early = project.jobkit("submit", str(project.yaml), *sweep, "--json", check=False)
    assert (early.returncode, len(json.loads(early.stdout)["left"])) == (75, 2)
    first.end_save()
    assert cancel.wait() == 0
    waited = project.jobkit("wait", file.name, check=False)
    assert (waited.returncode, "2 run(s) have not begun" in waited.stderr) == (75, True)
