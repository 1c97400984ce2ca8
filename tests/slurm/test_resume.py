"""Whatever interrupts a run, its weights are those of the run that nothing interrupted, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.project import (
    Project,
    assert_each_step_once,
    events,
    logged_steps,
    names,
    queue,
    status,
    step,
    wait_for,
    weights,
)
from slurm_cluster import Cluster

STEPS = 60


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights after an uninterrupted run of 4 ranks, on this machine."""
    project = Project(tmp_path_factory.mktemp("uninterrupted"))
    project.submit("--local")
    (run,) = project.runs
    assert_each_step_once(run, STEPS)
    assert status(run)["state"] == "finished"
    return weights(run)


def causes(run: Path) -> list[str]:
    return [attempt["cause"] for attempt in status(run)["attempts"]]


def is_over(run: Path) -> bool:
    return status(run).get("state") in ("finished", "failed", "cancelled")


def interrupt_when(run: Path, attempt: int, at_step: int, action: Callable[[], object]) -> None:
    """Wait until an attempt is well on its way, then do something to it, and wait until it has ended."""
    wait_for(
        f"step {at_step} in attempt {attempt}",
        lambda: len(status(run).get("attempts", [])) == attempt and step(run) >= at_step,
        run,
    )
    action()
    wait_for(f"the end of attempt {attempt}", lambda: status(run)["attempts"][attempt - 1]["cause"], run)


def test_preempted_twice_on_slurm(slurm: Cluster, tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", "params.sleep=0.1")
    (run,) = project.runs
    job = status(run)["job_id"]
    interrupt_when(run, 1, 10, lambda: slurm.preempt(job))
    interrupt_when(run, 2, 30, lambda: slurm.preempt(job))
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "preempted", "finished"]
    assert {attempt["job_id"] for attempt in status(run)["attempts"]} == {job}
    assert weights(run) == uninterrupted
    assert_each_step_once(run, STEPS)


def test_timed_out_twice_on_slurm(slurm: Cluster, tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path, slurm.env)
    # One minute is Slurm's shortest limit; its --signal comes at once then, a minute early, and must not stop the run.
    project.submit("--cluster", "slurm", "resources.time=0:01:00", "params.sleep=1.6")
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run, seconds=400)
    assert causes(run)[-1] == "finished"
    assert causes(run).count("timeout") >= 2
    assert set(causes(run)[:-1]) == {"timeout"}
    assert weights(run) == uninterrupted
    assert_each_step_once(run, STEPS)


def test_interrupted_twice_on_this_machine(tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path)
    for attempt, (number, at_step) in enumerate([(signal.SIGINT, 10), (signal.SIGTERM, 30)], start=1):
        process = project.start("submit", "toy.yaml", "--local", "params.sleep=0.05")
        wait_for("a run directory", lambda: project.runs)
        (run,) = project.runs
        interrupt_when(run, attempt, at_step, lambda: process.send_signal(number))  # noqa: B023
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
        assert "the same command continues" in errors
    project.submit("--local", "params.sleep=0.05")
    assert causes(run) == ["user", "user", "finished"]
    assert weights(run) == uninterrupted
    assert_each_step_once(run, STEPS)


def test_a_killed_foreground_command_leaves_a_checkpoint_and_no_process(tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path)
    process = project.start("submit", "toy.yaml", "--local", "params.sleep=0.05")
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    interrupt_when(run, 1, 10, process.kill)
    process.communicate(timeout=60)
    controller = int(status(run)["job_id"])
    wait_for("the end of the controller", lambda: not Path(f"/proc/{controller}").exists(), run)
    project.submit("--local", "params.sleep=0.05")
    assert causes(run) == ["user", "finished"]
    assert weights(run) == uninterrupted


def test_preemption_with_a_user_signal_instead_of_sigterm(
    tmp_path: Path, uninterrupted: bytes, short_dir: Path
) -> None:
    with Cluster(short_dir, nodes=2, user_signal=True) as cluster:
        project = Project(tmp_path, cluster.env)
        project.submit("--cluster", "slurm", "params.sleep=0.1")
        (run,) = project.runs
        interrupt_when(run, 1, 10, lambda: cluster.preempt(status(run)["job_id"]))
        wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "finished"]
    assert weights(run) == uninterrupted
    assert_each_step_once(run, STEPS)


def test_scancel_is_final_and_leaves_a_checkpoint_with_loader_workers_too(
    slurm: Cluster, tmp_path: Path, uninterrupted: bytes
) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", "params.sleep=0.1", "params.workers=1")
    (run,) = project.runs
    job = status(run)["job_id"]
    interrupt_when(run, 1, 10, lambda: slurm.command("scancel", job))
    wait_for("an empty queue", lambda: job not in queue(slurm, project), run)
    assert status(run)["state"] == "cancelled"
    assert "requeued" not in names(run)
    assert status(run)["checkpoint"] >= 10
    project.submit("--cluster", "slurm", "params.sleep=0.1", "params.workers=1")
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["cancelled", "finished"]
    assert status(run)["attempts"][1]["job_id"] != job
    assert weights(run) == uninterrupted
    assert_each_step_once(run, STEPS)


def test_jobkit_cancel_is_final_wherever_the_run_is(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    for place in ("--local", "--cluster=slurm"):
        project.submit(place, "--detach", f"params.place={place}", "params.sleep=0.1")
        run = project.run_of(f"params.place={place}", "params.sleep=0.1")
        wait_for("some steps", lambda: step(run) >= 5, run)  # noqa: B023
        printed = project.jobkit("cancel", run.name).stdout
        assert "cancelled at step" in printed
        assert status(run)["state"] == "cancelled"
        assert events(run)[-1]["event"] in ("interrupted", "cancelled")
    wait_for("an empty queue", lambda: not queue(slurm, project))


def test_a_run_moves_between_slurm_and_this_machine(slurm: Cluster, tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", "params.sleep=0.1")
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 10, run)
    project.jobkit("cancel", run.name)
    project.submit("--local", "params.sleep=0.1")
    assert [attempt["cluster"] for attempt in status(run)["attempts"]] == ["slurm", "local"]
    assert weights(run) == uninterrupted


def test_cuda_visible_devices_reaches_local_tasks_as_the_user_set_it(tmp_path: Path) -> None:
    project = Project(tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    project.submit("--local", "params.steps=2", "resources.nodes=1")
    assert status(project.runs[0])["result"]["visible"] == "4,5"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "4,5"


def test_a_step_longer_than_the_time_limit_leaves_is_requeued_from_the_last_checkpoint(
    slurm: Cluster, tmp_path: Path
) -> None:
    project = Project(tmp_path, slurm.env)
    (project.path / "mytask.py").write_text(
        "import time\n"
        "def train(ctx):\n"
        "    for step in ctx.steps(3):\n"
        "        if step == 2 and ctx.attempt == 1: time.sleep(300)\n"
    )
    project.submit("--cluster", "slurm", "resources.time=0:01:00", "checkpoint.every=1")
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run, seconds=200)
    assert causes(run) == ["timeout", "finished"]
    assert status(run)["attempts"][1]["first_step"] == 2


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
            f"params={{slow: {slow}, late: {late}}}",
        )
        if slow:
            process = project.start("submit", "toy.yaml", *command)
            wait_for("the evaluation", lambda: list(project.path.glob("runs/*/evaluating")))  # noqa: B023
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
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
    process = project.start("submit", "toy.yaml", "--local", "params.sleep=0.2")
    wait_for("an attempt", lambda: project.runs and "started" in names(project.runs[0]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    (run,) = project.runs
    assert process.returncode == 75
    assert status(run)["state"] == "interrupted" and status(run)["step"] < 5


def test_a_cancel_at_the_very_start_is_final(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", "params.sleep=0.2")
    (run,) = project.runs
    wait_for("an attempt", lambda: "started" in names(run), run)
    project.jobkit("cancel", run.name)
    assert status(run)["state"] == "cancelled"
    wait_for("an empty queue", lambda: not queue(slurm, project), run)
    assert "requeued" not in names(run)


def test_a_run_killed_after_its_loop_finishes_all_the_same(tmp_path: Path, uninterrupted: bytes) -> None:
    project = Project(tmp_path)
    task = project.path / "mytask.py"
    task.write_text(
        task.read_text().replace("    return {", "    if ctx.attempt == 1: time.sleep(1); os._exit(9)\n    return {")
    )
    project.submit("--local")
    (run,) = project.runs
    assert causes(run) == ["crashed", "finished"] and status(run)["attempts"][1]["first_step"] == STEPS - 1
    assert weights(run) == uninterrupted
    assert logged_steps(run) == list(range(STEPS))
