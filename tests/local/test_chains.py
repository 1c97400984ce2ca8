"""Runs that come after others, on this machine: they follow the run, whatever becomes of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.processes import processes_of
from harness.project import Project, events, names, status, wait_for

TASK = """
import json, pathlib

def train(ctx):
    return {"accuracy": 0.5, "best": {"step": 7, "name": "a b"}, "loss": None}

def show(ctx):
    pathlib.Path("shown.json").write_text(json.dumps(dict(ctx.params), default=str))
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Commands that end when a file of their name is there, with its text as exit code, and two tasks."""
    made = Project(tmp_path / "project", {"JOBKIT_DEVICES_DIR": str(tmp_path / "devices")})
    gate = "while test ! -e $0; do sleep 0.05; done; exit $(cat $0)"
    (made.path / "gate.yaml").write_text(
        f"name: gate\ncommand: [sh, -c, '{gate}', '${{name}}']\nretry: {{crash: 1}}\nclusters: {{slurm: {{}}}}\n"
    )
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "task.yaml").write_text("name: task\ntask: mytask:train\n")
    yield made
    for run in made.runs:
        for process in processes_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def submit(project: Project, name: str, *words: str, file: str = "gate.yaml") -> Path:
    """A run in the background; returns its directory."""
    done = project.jobkit("submit", file, "--local", "--detach", f"name={name}", *words)
    return Path(done.stdout.split("run directory ")[1].strip())


def opened(project: Project, run: Path, name: str, code: int = 0) -> None:
    """Let a command end with an exit code."""
    (project.path / f"{name}.new").write_text(str(code))
    (project.path / f"{name}.new").rename(project.path / name)
    state = "failed" if code else "finished"
    wait_for(f"that it has {state}", lambda: status(run)["state"] == state, run)


def test_a_run_starts_when_the_runs_that_it_comes_after_are_finished(project: Project) -> None:
    first, second = submit(project, "a"), submit(project, "b")
    third = submit(project, "c", "--after", "a", "--after", second.name)
    assert f"waiting for: {first.name} (running), {second.name} (running)" in jobkit(project, "status", "c").stdout
    opened(project, second, "b")
    assert f"waiting for: {first.name} (running)\n" in jobkit(project, "status", "c").stdout
    assert names(third) == ["submitting", "submitted", "waiting"] or names(third) == [
        "submitting",
        "waiting",
        "submitted",
    ]
    opened(project, first, "a")
    opened(project, third, "c")
    started = next(event["time"] for event in events(third) if event["event"] == "started")
    assert all(event["time"] < started for run in (first, second) for event in events(run))
    assert submit(project, "d", "--after", "a"), "one that is finished already is not waited for"
    (fourth,) = project.path.glob("runs/d-*")
    wait_for("its start", lambda: status(fourth)["state"] == "running", fourth)
    assert "waiting" not in names(fourth)


def test_a_run_that_comes_after_others_is_the_same_run(project: Project) -> None:
    before = project.run_of("name=x")
    submit(project, "a")
    assert project.run_of("name=x", "--after", "a") == before == project.run_of("name=x", "after=a")


def test_what_waits_follows_the_run_through_a_failure_and_its_continuation(project: Project) -> None:
    first = submit(project, "a")
    second = submit(project, "b", "--after", "a")
    opened(project, first, "a", code=3)
    assert f"waiting for: {first.name} (failed)" in jobkit(project, "status", "b").stdout
    (project.path / "a").unlink()
    project.jobkit("resume", "a", "--detach")
    assert f"waiting for: {first.name} (running)" in jobkit(project, "status", "b").stdout
    opened(project, first, "a")
    opened(project, second, "b")


def test_what_waits_is_cancelled_with_the_run_and_says_why(project: Project) -> None:
    first = submit(project, "a")
    second = submit(project, "b", "--after", "a")
    third = submit(project, "c", "--after", "b")
    jobkit(project, "cancel", "a")
    for run, before in ((second, first), (third, second)):
        wait_for("its end", lambda run=run: status(run)["state"] == "cancelled", run)
        said = jobkit(project, "status", run.name).stdout
        assert f"error: it comes after {before.name}, which was cancelled" in said
    assert "cancelled: " in jobkit(project, "submit", "gate.yaml", "--local", "name=d", "--after", "a", expect=2).stderr


def test_a_name_that_is_none_and_a_circle_are_refused(project: Project) -> None:
    first = submit(project, "a")
    second = submit(project, "b", "--after", "a")
    for words, said in (
        (("name=c", "--after", "nosuch"), "no run 'nosuch'"),
        (("name=c", "after=[gatee]"), "command line: after: no run 'gatee'"),
        (("name=c", "--after", "b", "command=['true','${run:nosuch}']"), "command: no run 'nosuch'"),
        (("name=c", "seed=${run:a.result}"), "seed: found ${run:...}, which is known in `command`, `params`"),
    ):
        done = jobkit(project, "submit", "gate.yaml", "--local", *words, expect=2)
        assert said in done.stderr and 1 <= len(done.stderr.splitlines()) <= 2
    assert len(project.runs) == 2
    jobkit(project, "cancel", "b")
    wait_for("its end", lambda: processes_of(second) == [], second)
    opened(project, first, "a", code=1)
    done = jobkit(project, "submit", "gate.yaml", "--local", "name=a", "--after", "a", expect=2)
    assert f"after: found {first.name}: that one comes after this one, {first.name}" in done.stderr


def test_results_of_other_runs_are_params_when_the_run_starts(project: Project) -> None:
    gate = submit(project, "gate")
    task = submit(project, "train", "--after", "gate", file="task.yaml")
    words = (
        "task=mytask:show",
        "+params.accuracy=${run:train.result.accuracy}",
        "+params.step=${run:train.result.best.step}",
        "+params.text=is ${run:train.result.best.name} at ${run:train.result.best.step}",
        "+params.weights=${run:train}/final",
        "inputs=['${run:train}/config.yaml']",
    )
    shown = submit(project, "show", *words, file="task.yaml")
    assert f"waiting for: {task.name} (queued)" in jobkit(project, "status", "show").stdout
    assert f"${{run:{task.name}.result.accuracy}}" in (shown / "config.yaml").read_text()
    same = submit(project, "show", *(word.replace("run:train", f"run:{task.name}") for word in words), file="task.yaml")
    assert same == shown, "the whole name means the same run"
    opened(project, gate, "gate")
    wait_for("its end", lambda: status(shown)["state"] == "finished", shown)
    assert json.loads((project.path / "shown.json").read_text()) == {
        "accuracy": 0.5,
        "step": 7,
        "text": "is a b at 7",
        "weights": f"{task}/final",
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "params.x=${run:train.result.acuracy}",
            "has no 'acuracy' (it has accuracy, best, loss); did you mean 'accuracy'?",
        ),
        ("params.x=${run:train.result.best.step.more}", "has no 'more' (there it is 7)"),
        ("inputs=['${run:train}/nothing']", "/nothing: no such file or directory"),
    ],
)
def test_a_result_that_is_not_there_ends_the_run_at_once(project: Project, word: str, said: str) -> None:
    train = submit(project, "train", file="task.yaml")
    run = submit(project, "show", "task=mytask:show", f"+{word}" if "params" in word else word, file="task.yaml")
    wait_for("its end", lambda: status(run)["state"] == "failed", run)
    assert said in status(run)["error"] and status(run)["attempts"] == []
    assert status(train)["state"] == "finished"


def test_ctrl_c_ends_the_wait_and_the_same_command_waits_again(project: Project) -> None:
    first = submit(project, "a")
    command = project.start("submit", "gate.yaml", "--local", "name=b", "--after", "a")
    assert command.stderr is not None
    assert command.stderr.readline() == f"queued: waiting for {first.name} (running)\n"
    command.send_signal(signal.SIGINT)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == 75
    assert "submit gate.yaml name=b --local --after a" in said
    (run,) = project.path.glob("runs/b-*")
    assert status(run)["state"] == "interrupted"
    submit(project, "b", "--after", "a")
    opened(project, first, "a")
    opened(project, run, "b")


def piped(project: Project, stages: str = "{a: {}, b: {after: a}}") -> Path:
    """A pipeline of gates."""
    gate = (project.path / "gate.yaml").read_text().replace("name: gate", "name: pipe")
    (project.path / "pipe.yaml").write_text(f"{gate}pipeline: {stages}\n")
    return project.path / "pipe.yaml"


def test_a_pipeline_is_followed_and_left_where_a_stage_has_failed(project: Project) -> None:
    piped(project)
    following = project.start("submit", "pipe.yaml", "--local")
    wait_for("both stages", lambda: len(project.runs) == 2)
    first, second = project.runs
    wait_for("that one waits", lambda: status(second).get("state") == "queued", second)
    opened(project, first, "pipe-a", code=3)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 1 and "pipeline pipe: 1 failed, 1 queued" in out, (out, err)
    assert f"{second.name} waits for {first.name} (failed); to continue: " in err and f"{first.name} failed" in err
    (project.path / "pipe-b").write_text("0")
    (project.path / "pipe-a").write_text("0")
    jobkit(project, "resume", first.name, "--detach")
    wait_for("that the other goes on", lambda: status(second)["state"] == "finished", second)


def test_stages_that_were_submitted_before_one_that_cannot_be_are_named(project: Project) -> None:
    piped(project)
    jobkit(project, "submit", "pipe.yaml", "--local", "--stage", "a", "--detach")
    (first,) = project.runs
    plan = jobkit(project, "submit", "pipe.yaml", "--local", "--stage", "b", "--dry-run").stdout
    second = re.findall(r"pipe-b-[0-9a-f]{8}", plan)[0]
    first.with_name(second).write_text("no directory")
    done = jobkit(project, "submit", "pipe.yaml", "--local", expect=2)
    assert "submitted before that: stage a; the same command submits the rest" in done.stderr
    assert f"{second}/checkpoints: Not a directory" in done.stderr
    opened(project, first, "pipe-a")


def test_ctrl_c_stops_a_pipeline_and_several_runs_are_followed_as_they_are_resumed(project: Project) -> None:
    piped(project)
    following = project.start("submit", "pipe.yaml", "--local")
    wait_for("both stages", lambda: len(project.runs) == 2)
    first, second = project.runs
    wait_for("that one waits and one runs", lambda: "started" in names(first) and status(second).get("waiting"), first)
    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 75 and "pipeline pipe: 2 interrupted" in out, (out, err)
    for name in ("pipe-a", "pipe-b"):
        (project.path / name).write_text("0")
    done = project.jobkit("resume", first.name, second.name, "-y")
    assert "2 run(s): 2 finished" in done.stdout


@pytest.mark.parametrize(
    "words", [("submit", "pipe.yaml", "--local"), ("resume", "pipe*", "-y")], ids=lambda one: one[0]
)
def test_ctrl_c_while_several_are_submitted_stops_those_that_were(project: Project, words: tuple[str, ...]) -> None:
    piped(project, "{a: {}, b: {}, c: {}, d: {}}")
    if words[0] == "resume":
        jobkit(project, "submit", "pipe.yaml", "--local", "--detach")
        jobkit(project, "cancel", "pipe*", "-y")
    before = len(project.runs) > 0
    command = project.start(*words)
    wait_for("the first", lambda: any(names(run).count("submitted") > before for run in project.runs))
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 75 and "nothing was started" not in err, (out, err)
    states = {status(run)["state"] for run in project.runs}
    assert "interrupted" in states and states <= {"interrupted", "cancelled"}, (states, out, err)
