"""A script with jobkit.init() that has no loop: a stop ends it as without jobkit, and what is missing is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, events, status, wait_for

BEGINNING = "import signal, sys, time\nimport torch\nimport jobkit\n"
ENDLESS = """\
open("begun", "w").close()
while True:
    time.sleep(0.05)
"""
INIT = 'ctx = jobkit.init(name="plain", runs_dir="runs")\n'


def as_from_a_terminal() -> None:
    """The tests themselves may run in a shell's background, where Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(BEGINNING + script)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, "train.py"], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=pipe, stderr=pipe, preexec_fn=as_from_a_terminal
    )


def run_to_end(folder: Path, script: str) -> str:
    """What it printed."""
    process = start(folder, script)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return printed


def signalled(folder: Path, script: str, *numbers: int) -> tuple[int, str, str]:
    """Its exit code, what it printed, and what it printed as errors, where signals come when it has begun."""
    process = start(folder, script)
    wait_for("its beginning", lambda: (folder / "begun").exists() or process.poll() is not None)
    for number in numbers:
        process.send_signal(number)
    printed, errors = process.communicate(timeout=300)
    return process.returncode, printed, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_script_that_has_no_loop_as_without_jobkit(tmp_path: Path, number: int) -> None:
    code, printed, errors = signalled(tmp_path, INIT + ENDLESS, number)
    assert code == -number
    assert f"{signal.Signals(number).name} came, and no loop of jobkit's has begun" in printed
    assert "for epoch in ctx.epochs(" in printed
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    (run,) = tmp_path.glob("runs/plain-*")
    assert (status(run)["state"], status(run)["attempts"][0]["cause"]) == ("interrupted", "user")
    assert [event["event"] for event in events(run)].count("interrupted") == 1


def test_a_signal_for_a_script_whose_loop_begins_soon_stops_it_in_order(tmp_path: Path) -> None:
    waits = (
        "from jobkit.worker.stop import STOP_SIGNALS\n"
        'open("begun", "w").close()\n'
        "while not STOP_SIGNALS.pending: time.sleep(0.01)\n"
        "for step in ctx.steps(10): pass\n"
        "ctx.finish()\n"
    )
    code, printed, _ = signalled(tmp_path, INIT + waits, signal.SIGTERM)
    (run,) = tmp_path.glob("runs/plain-*")
    assert (code, status(run)["checkpoint"]) == (75, 1) and "no loop" not in printed


def test_a_handler_of_the_scripts_own_is_called_where_there_is_no_loop(tmp_path: Path) -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: (print('my own', flush=True), sys.exit(7)))\n"
    code, printed, _ = signalled(tmp_path, own + INIT + ENDLESS, signal.SIGTERM)
    assert code == 7 and "my own" in printed


def test_finish_and_its_absence_say_that_there_was_no_loop_and_what_to_write(tmp_path: Path) -> None:
    train = "layer = torch.nn.Linear(2, 2)\n"
    for end in ("ctx.finish()\n", ""):
        printed = run_to_end(tmp_path, INIT + train + end)
        assert "no loop of jobkit's was begun, so there was no checkpoint" in printed
        assert "for epoch in ctx.epochs(" in printed
        assert ("the script ended without ctx.finish(result)" in printed) == (not end)
        (run,) = tmp_path.glob("runs/plain-*")
        assert status(run)["state"] == ("finished" if end else "interrupted")
        run.rename(tmp_path / f"seen{len(end)}")


def test_what_to_write_is_that_of_the_framework_that_trains(tmp_path: Path) -> None:
    for module, said in (
        ("transformers.trainer", "resume_from_checkpoint=job.checkpoint"),
        ("pytorch_lightning.trainer", "trainer.fit(model, ckpt_path=job.checkpoint)"),
    ):
        imported = f"sys.modules[{module!r}] = sys\n"
        assert said in run_to_end(tmp_path, imported + INIT.replace("plain", module[0]) + "ctx.finish()\n")


def test_an_evaluation_alone_is_not_told_of_a_loop(tmp_path: Path) -> None:
    evaluate = "ctx.map(lambda batch, ids: None, 3)\nctx.finish()\n"
    assert "no loop" not in run_to_end(tmp_path, INIT + evaluate)


def test_a_forgotten_finish_is_named_and_nothing_is_said_to_go_on(tmp_path: Path) -> None:
    printed = run_to_end(tmp_path, INIT + "for step in ctx.steps(3): pass\n")
    assert "ended without ctx.finish(result)" in printed and "continues it from step 2" in printed
    assert "goes on" not in printed
    (run,) = tmp_path.glob("runs/plain-*")
    (left,) = status(run)["attempts"]
    assert (left["cause"], left["last_step"], left["durable_step"]) == ("left", 3, 2), "three were done"
    assert "ended without" not in run_to_end(tmp_path, INIT + "for step in ctx.steps(3): pass\nctx.finish()\n")


def test_a_script_of_a_command_that_has_no_loop_is_preempted_at_once_and_starts_again(tmp_path: Path) -> None:
    project = Project(tmp_path)
    body = ENDLESS.replace("begun", "{ctx.run_dir}/begun").replace('open("', 'open(f"')
    script = BEGINNING + "ctx = jobkit.init()\nif ctx.attempt == 1:\n"
    (project.path / "train.py").write_text(script + "".join(f"    {line}\n" for line in body.splitlines()))
    (project.path / "toy.yaml").write_text("name: toy\ncommand: [python, train.py]\nresources: {nodes: 1}\n")
    with project.start("submit", "toy.yaml", "--local") as process:
        wait_for("its start", lambda: process.poll() or (project.runs and (project.runs[0] / "begun").exists()))
        (run,) = project.runs
        project.jobkit("preempt", run.name)
        printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["preempted", "finished"]
    assert "no loop of jobkit's has begun" in printed + errors
