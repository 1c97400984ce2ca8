"""Whatever interrupts a run on this machine, its weights are those of the run that nothing interrupted, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import (
    Project,
    assert_each_step_once,
    causes,
    events,
    interrupt_when,
    logged_steps,
    names,
    status,
    step,
    wait_for,
    weights,
)
from harness.reference import STEPS

from jobkit.run.rundir import RunDir
from jobkit.run.snapshot import MANIFEST
from jobkit.submission import cancel

TWO_RANKS = ("resources.tasks_per_node=1",)


def test_interrupted_twice_on_this_machine(tmp_path: Path, uninterrupted: Callable[[int], bytes]) -> None:
    project = Project(tmp_path)
    project.slow_down(attempts=2)
    for attempt, (number, at_step) in enumerate([(signal.SIGINT, 10), (signal.SIGTERM, 30)], start=1):
        process = project.start("submit", "toy.yaml", "--local", *TWO_RANKS)
        wait_for("a run directory", lambda: project.runs)
        (run,) = project.runs
        interrupt_when(run, attempt, at_step, lambda: process.send_signal(number))  # noqa: B023
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 75, errors
        assert "the same command continues" in errors
    said = jobkit(project, "submit", "toy.yaml", "--local", "seed=7", "--dry-run").stderr
    assert f"a new run, from step 0: seed 0 -> 7, compared with {run.name}, interrupted at step " in said
    project.submit("--local", *TWO_RANKS)
    assert causes(run) == ["user", "user", "finished"]
    assert weights(run) == uninterrupted(2)
    assert_each_step_once(run, STEPS, ranks=2)


def test_a_killed_foreground_command_leaves_a_checkpoint_and_no_process(
    tmp_path: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    project = Project(tmp_path)
    project.slow_down(attempts=1)
    process = project.start("submit", "toy.yaml", "--local", *TWO_RANKS)
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    interrupt_when(run, 1, 10, process.kill)
    process.communicate(timeout=600)
    supervisor = int(status(run)["job_id"])
    wait_for("the end of the supervisor", lambda: not Path(f"/proc/{supervisor}").exists(), run)
    project.submit("--local", *TWO_RANKS)
    assert causes(run) == ["user", "finished"]
    assert weights(run) == uninterrupted(2)


def test_jobkit_cancel_is_final(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.slow_down(attempts=1)
    project.submit("--local", "--detach", *TWO_RANKS)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    assert "cancelled at step" in project.jobkit("cancel", run.name).stdout
    assert status(run)["state"] == "cancelled"
    assert events(run)[-1]["event"] in ("interrupted", "cancelled")


def test_a_cancel_without_grace_kills_and_says_what_is_lost(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.slow_down(attempts=1)
    project.submit("--local", "--detach", *TWO_RANKS, "checkpoint.every=1000")
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    said = project.jobkit("cancel", run.name, "--no-grace").stdout
    assert "it had no checkpoint, the" in said and "step(s) since are repeated" in said
    assert (status(run)["state"], status(run)["checkpoint"]) == ("cancelled", None)


def test_cuda_visible_devices_reaches_local_tasks_as_the_user_set_it(tmp_path: Path) -> None:
    project = Project(tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    project.submit("--local", "params.steps=2", "resources.nodes=1")
    assert status(project.runs[0])["result"]["visible"] == "4,5"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "4,5"


EVALUATING = """
import time
import torch

def train(ctx):
    model = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    held_out = torch.utils.data.TensorDataset(torch.randn(20, 4))

    def error(batch, ids):
        time.sleep(ctx.params.slow if ctx.attempt == 1 else 0)
        return (model(batch[0]) - 1).square().mean(1)

    def step_once():
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        return loss

    for step in ctx.steps(12):
        if ctx.params.late:
            loss = step_once()
        if step == 6:
            (ctx.run_dir / "evaluating").touch()
            ctx.log({"validation/loss": ctx.evaluate(error, held_out, batch_size=2)})
        if not ctx.params.late:
            loss = step_once()
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}
"""


@pytest.mark.parametrize("late", [False, True], ids=["at the top of a step", "after a step's update"])
def test_a_stop_during_an_evaluation_leaves_the_run_exact(tmp_path: Path, late: bool) -> None:
    finals = []
    for slow in (0.0, 0.3):
        project = Project(tmp_path / str(slow))
        (project.path / "mytask.py").write_text(EVALUATING)
        command = (
            "--local",
            "resources.nodes=1",
            "resources.tasks_per_node=1",
            f"+params={{slow: {slow}, late: {late}}}",
        )
        if slow:
            process = project.start("submit", "toy.yaml", *command)
            wait_for("the evaluation", lambda: list(project.path.glob("runs/*/evaluating")))  # noqa: B023
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=600)
            (run,) = project.runs
            assert status(run)["step"] == (7 if late else 6)
        project.submit(*command)
        (run,) = project.runs
        assert logged_steps(run) == list(range(12))
        assert logged_steps(run, "validation/loss") == [6]
        finals.append(weights(run))
    assert finals[0] == finals[1]


def test_a_stop_at_the_very_start_is_not_lost(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.slow_down(attempts=1)
    process = project.start("submit", "toy.yaml", "--local", *TWO_RANKS)
    wait_for("an attempt", lambda: project.runs and "started" in names(project.runs[0]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    (run,) = project.runs
    assert process.returncode == 75
    assert status(run)["state"] == "interrupted" and status(run)["step"] < 5


def test_a_run_killed_after_its_loop_finishes_all_the_same(
    tmp_path: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    project = Project(tmp_path)
    task = project.path / "mytask.py"
    task.write_text(
        task.read_text().replace("    return {", "    if ctx.attempt == 1: time.sleep(1); os._exit(9)\n    return {")
    )
    project.submit("--local", *TWO_RANKS)
    (run,) = project.runs
    assert causes(run) == ["crashed", "finished"] and status(run)["attempts"][1]["first_step"] == STEPS - 1
    assert weights(run) == uninterrupted(2)
    assert logged_steps(run) == list(range(STEPS))


# A process namespace of its own under the same host name, as a container has that shares the host's network.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def test_a_cancel_signals_no_process_that_only_has_the_number_of_one_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a container needs root")
    project = Project(tmp_path)
    words = [*CONTAINER, sys.executable, "-m", "jobkit", "submit", "toy.yaml", "--local", *TWO_RANKS]
    project.slow_down(attempts=1)
    with subprocess.Popen(words, cwd=project.path, env=project.env, stdout=subprocess.DEVNULL) as container:
        wait_for("some steps", lambda: bool(project.runs) and step(project.runs[0]) >= 3)
        (run,) = project.runs
        signalled: list[int] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid) if number else None)
        assert cancel.cancel(RunDir(run)) is not None, "its supervisor finds the request in the run directory"
        monkeypatch.undo()
        container.wait(60)
    assert (signalled, status(run)["state"]) == ([], "cancelled")


def test_a_cancel_while_the_attempt_is_about_to_begin_is_carried_out(tmp_path: Path) -> None:
    project = Project(tmp_path)
    endless = ("--local", *TWO_RANKS, "params.steps=100000")
    run = project.run_of(*endless[1:])
    run.parent.mkdir()
    with RunDir(run).begin_lock():
        project.submit(*endless, "--detach")
        # What the supervisor reads of the code after it has seen that nobody has cancelled the run.
        (manifest,) = run.glob(f"code/*/{MANIFEST}")
        content = manifest.read_text()
        manifest.unlink()
        os.mkfifo(manifest)
    with manifest.open("w") as pipe:  # opens when the supervisor reads
        cancel = project.start("cancel", run.name)
        wait_for("the request", lambda: "cancel_requested" in names(run), run)
        assert "started" not in names(run)
        pipe.write(content)
    printed, errors = cancel.communicate(timeout=600)
    assert cancel.returncode == 0 and "cancelled at step" in printed, errors
    assert causes(run) == ["cancelled"]


def test_a_run_whose_directory_is_removed_ends(tmp_path: Path) -> None:
    project = Project(tmp_path)
    process = project.start("submit", "toy.yaml", "--local", "params.steps=100000", "params.sleep=0.01")
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    supervisor = int(status(run)["job_id"])
    aside = run.rename(tmp_path / "aside")  # at once: rm -r would race with what is written there
    shutil.rmtree(aside)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    assert f"{run} was removed, or moved: the run has ended" in output + errors
    assert not Path(f"/proc/{supervisor}").exists()
    assert not run.exists()
    done = project.jobkit("list")
    assert "no runs in" in done.stdout
