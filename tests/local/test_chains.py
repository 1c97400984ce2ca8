"""A run after another one, and the command that is called at the end of a run, on this machine."""

from __future__ import annotations

import json
import shlex
import signal

from harness.runs import Launch, Project, wait_until


def row(project: Project, launch: Launch) -> dict[str, object]:
    """Return what `list` says of a run."""
    rows = json.loads(project.jobkit("list", "--json").stdout)
    (value,) = [value for value in rows if value["run"] == launch.run.name]
    return dict(value)


def test_a_chain_of_two_through_a_failure(project: Project) -> None:
    first = project.submit("--local", "--detach", "retry.crash=0", steps=100_000).wait_for_step(1)
    second = project.submit("--local", "--detach", "--after", "scripted", steps=3)
    assert row(project, second)["waits"] == f"{first.run.name} (running)"
    assert first.run.name in project.jobkit("status", second.run.name).stdout
    first.kill_rank(0).wait_until_over()
    second.wait_until_over()
    assert (first.status.state, second.status.state) == ("failed", "interrupted")
    assert second.status.attempts == []
    assert first.run.name in second.status.reason

    words = ("submit", str(project.yaml), "--local", "--detach", "params.steps=3", "--after", first.run.name)
    refused = project.jobkit(*words, check=False)
    assert (refused.returncode, second.status.person_submission) == (2, 1)
    assert f"resume {first.run.name}" in refused.stderr
    project.jobkit("resume", first.run.name, "--detach", "--notify", "echo $JOBKIT_STATE >told")
    project.jobkit(*words)
    first.wait_for_attempt(2).end_training().wait_until_over()
    second.wait_until_over()
    assert (first.status.state, second.causes) == ("finished", ["finished"])
    assert second.status.attempts[0].began.time >= first.status.since
    told = project.folder / "told"
    wait_until(lambda: told.exists() and told.read_text() == "finished\n", "the command of --notify")


def test_a_run_that_waits_can_be_stopped_and_cancelled(project: Project) -> None:
    first = project.submit("--local", "--detach", steps=100_000).wait_for_step(1)
    process = project.start("submit", str(project.yaml), "--local", "params.steps=3", "--after", first.run.name)
    assert process.stdout is not None
    wait_until(lambda: f"waiting: {first.run.name}" in process.stdout.readline(), "the words")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    second = project.only_run(first)
    assert (second.status.state, second.status.attempts) == ("interrupted", [])

    project.jobkit("resume", second.run.name, "--detach")
    project.jobkit("cancel", "-y", second.run.name)
    assert (second.status.state, second.status.attempts) == ("cancelled", [])

    project.jobkit("resume", second.run.name, "--detach")
    project.jobkit("cancel", "-y", first.run.name)
    second.wait_until_over()
    assert (second.status.state, second.status.attempts) == ("interrupted", [])


def test_each_end_of_a_run_is_told_once(project: Project) -> None:
    said = project.folder / "said"
    command = 'echo "$JOBKIT_NAME|$JOBKIT_STATE|$JOBKIT_STEP|$JOBKIT_RESULT|$JOBKIT_ERROR" >>said'
    words = ("submit", str(project.yaml), "--local", "params.steps=100000")
    process = project.start(*words, "--notify", command)
    launch = project.only_run().wait_for_step(5)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75

    project.jobkit("resume", launch.run.name, "--detach")
    launch.wait_for_attempt(2).kill_rank(0)
    launch.wait_for_attempt(3)
    project.jobkit("preempt", launch.run.name)
    launch.wait_for_attempt(4).end_training().wait_until_over()
    wait_until(lambda: not launch.run.alive_lock().is_held(), "the end of the job")
    lines = [line.split("|") for line in said.read_text().splitlines()]
    assert launch.causes == ["stopped", "killed", "preempted", "finished"]
    assert [line[:2] for line in lines] == [[launch.run.name, "interrupted"], [launch.run.name, "finished"]]
    assert lines[0][2] == str(launch.ends[0].last_step)
    assert json.loads(lines[1][3]) == launch.status.result
    assert (bool(lines[0][4]), lines[1][4]) == (True, "")


def test_a_run_that_the_command_starts_lives_on_its_own(project: Project) -> None:
    python = shlex.join(project.words("submit", str(project.yaml), "--local", "--detach", "params.steps=100000"))
    fault = [{"kind": "raise", "step": 3}]
    words = ("--local", "--detach", "retry.crash=1", "--notify", f'echo "$JOBKIT_ERROR" >said; {python}')
    first = project.submit(*words, steps=50, faults=fault).wait_until_over()
    wait_until(lambda: not first.run.alive_lock().is_held(), "the end of the job")
    assert "a fault of the script" in (project.folder / "said").read_text()
    second = project.only_run(first).wait_for_step(20)
    assert second.run.alive_lock().is_held()
    second.end_training().wait_until_over()
    assert second.causes == ["finished"]


def test_a_run_that_another_one_waits_for_is_not_removed(project: Project) -> None:
    done = project.submit("--local", steps=2).wait_until_over()
    trains = project.submit("--local", "--detach", steps=100_000).wait_for_step(1)
    both = ("--after", done.run.name, "--after", trains.run.name)
    waits = project.submit("--local", "--detach", *both, steps=3)
    removal = ("rm", "-y", done.run.name)
    refused = project.jobkit(*removal, check=False)
    assert (refused.returncode, done.run.path.exists()) == (2, True)
    assert f"{waits.run.name} waits for it" in refused.stderr
    project.jobkit(*removal, "--checkpoints-only")
    trains.end_training()
    assert waits.wait_until_over().causes == ["finished"]
    project.jobkit(*removal)
    assert not done.run.path.exists()
