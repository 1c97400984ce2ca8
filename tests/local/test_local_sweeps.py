"""A sweep on this machine: its runs wait for CPU slots, and one process waits on behalf of all of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from harness.project import Project, describe, names, status, step, wait_for

from jobkit.run.sweeps import at


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """On a machine of its own with two CPU slots; one rank a run."""
    machine = {"JOBKIT_CPU_SLOTS": "2", "JOBKIT_DEVICES_DIR": str(tmp_path / "devices")}
    made = Project(tmp_path / "project", machine)
    yaml = made.path / "toy.yaml"
    yaml.write_text(yaml.read_text().replace("nodes: 2, tasks_per_node: 2", "nodes: 1"))
    return made


def by_seed(project: Project) -> dict[int, Path]:
    found = {}
    for run in project.runs:
        seed = re.search(r"^seed: (\d+)$", (run / "config.yaml").read_text(), re.MULTILINE)
        assert seed is not None
        found[int(seed[1])] = run
    return found


def test_runs_take_turns_and_each_can_be_cancelled_and_more_can_be_wanted(project: Project) -> None:
    project.slow_down(1)
    sweep = ("--local", "params.steps=8", "--detach", "--sweep")
    done = project.submit(*sweep, "seed=0,1,2,3")
    assert "sweep toy/s1: 4 runs (4 new), one code snapshot" in done.stdout
    runs = by_seed(project)
    for seed in (0, 1):
        wait_for("a step", lambda run=runs[seed]: step(run) >= 1, runs[seed])
    assert [status(runs[seed])["state"] for seed in (2, 3)] == ["queued", "queued"], "there are two slots"
    assert "cancelled" in project.jobkit("cancel", runs[2].name).stdout
    task = project.path / "mytask.py"
    task.write_text(f"{task.read_text()}\n# another version\n")
    (project.path / "log.txt").touch()  # no code
    with (project.path / "toy.yaml").open("a") as yaml:
        yaml.write("# neither\n")
    again = project.submit(*sweep, "seed=0,1,2,3,4")
    told = "the code changed since: ~ mytask.py; [^+]* keep that of .*: python -m jobkit cancel toy/s1, then the same"
    assert re.search(told, again.stderr), again.stderr
    assert re.search(r"toy/s1: 5 runs \(1 new, 1 continued, \d (running|finished), \d (queued|running)", again.stdout)
    runs = by_seed(project)
    for run in runs.values():
        wait_for("the end", lambda run=run: status(run)["state"] == "finished", run)
    path = project.path / "runs" / ".sweeps" / "toy" / "s1"
    wait_for("the end of the process that waited", lambda: not at(path).has_runner())
    assert names(runs[2]).count("cancelled") == 1
    assert "5 runs (5 finished)" in project.submit(*sweep, "seed=0,1,2,3,4").stdout


def test_ctrl_c_stops_with_checkpoints_and_the_same_command_goes_on(project: Project) -> None:
    project.slow_down(1)
    words = ("submit", "toy.yaml", "--local", "params.steps=8", "--max-running", "1", "--sweep", "seed=0,1")
    sweeping = project.start(*words)
    wait_for("the runs", lambda: len(project.runs) == 2)
    runs = by_seed(project)
    wait_for("two steps", lambda: step(runs[0]) >= 2, runs[0])
    assert status(runs[1])["state"] == "queued"
    sweeping.send_signal(signal.SIGINT)
    out, err = sweeping.communicate(timeout=600)
    assert sweeping.returncode == 75, err
    assert "sweep toy/s1: 2 interrupted" in out
    assert [status(run)["state"] for run in runs.values()] == ["interrupted", "interrupted"]
    assert status(runs[0])["checkpoint"] == status(runs[0])["attempts"][0]["last_step"] >= 2

    done = project.jobkit(*words)
    assert "2 runs (2 continued)" in done.stdout and "sweep toy/s1: 2 finished" in done.stdout
    assert f"{runs[0].name} finished at step 8/8: " in done.stderr
    assert status(runs[0])["attempts"][1]["first_step"] >= 2, describe(runs[0])


def test_the_first_run_is_finished_before_the_others_start_and_each_tells_of_itself(project: Project) -> None:
    project.slow_down(1)
    tells = ("--notify", "echo $JOBKIT_TEXT >> told")  # where it was submitted
    sweep = ("--local", "params.steps=3", "--sweep", "seed=0,1,2")
    sweeping = project.start("submit", "toy.yaml", *sweep, "--first", *tells)
    assert sweeping.wait(timeout=600) == 0
    told = (project.path / "told").read_text().splitlines()
    assert sorted(told) == [f"{run.name}: finished at step 3/3" for run in project.runs]
    runs = by_seed(project)
    ended = status(runs[0])["attempts"][0]["ended"]
    assert all(ended < status(runs[seed])["attempts"][0]["started"] for seed in (1, 2))


def test_where_the_process_that_waits_is_killed_the_others_go_on_and_the_rest_is_started_again(
    project: Project,
) -> None:
    project.slow_down(1)
    sweep = ("--local", "params.steps=6", "--detach", "--max-running", "1", "--sweep", "seed=0,1")
    project.submit(*sweep)
    runs = by_seed(project)
    wait_for("a step", lambda: step(runs[0]) >= 1, runs[0])
    os.kill(int((project.path / "runs/.sweeps/toy/s1/runner.pid").read_text()), signal.SIGKILL)
    wait_for("the end", lambda: status(runs[0])["state"] == "finished", runs[0])
    assert "probably lost" in project.jobkit("list").stdout
    assert "2 runs (1 continued, 1 finished)" in project.submit(*sweep).stdout
    wait_for("the end", lambda: status(runs[1])["state"] == "finished", runs[1])
    assert len(status(runs[0])["attempts"]) == 1


def test_a_run_that_cannot_be_started_keeps_no_device(project: Project) -> None:
    """The folder in which the sweep was typed is gone."""
    project.slow_down(1)
    project.env["JOBKIT_RUNS"] = str(project.path.parent / "runs")
    sweep = ("--local", "params.steps=4", "--detach", "--max-running", "1", "--sweep", "seed=0,1,2")
    project.submit(*sweep)
    path = project.path.parent / "runs" / ".sweeps" / "toy" / "s1"
    runs = [path.parents[2] / name for name in at(path).record().runs]
    wait_for("a step", lambda: step(runs[0]) >= 1, runs[0])
    project.path.rename(project.path.with_name("renamed"))
    wait_for("the end of the process that waited", lambda: not at(path).has_runner(), runs[2])
    assert [status(run)["state"] for run in runs] == ["finished", "interrupted", "interrupted"]
    assert "No such file or directory" in status(runs[2])["error"]
