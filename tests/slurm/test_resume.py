"""Whatever Slurm does to a run, its weights are those of the run that nothing interrupted, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.project import (
    Project,
    assert_each_step_once,
    causes,
    events,
    interrupt_when,
    is_over,
    names,
    queue,
    status,
    step,
    wait_for,
    weights,
)
from harness.quick_slurm import QUICK
from harness.reference import STEPS
from slurm_cluster import Cluster

ON_SLURM = ("--cluster", "slurm", "resources.tasks_per_node=1")
"""One rank on each of two nodes."""

ALONE = (*ON_SLURM, "resources.nodes=1")
"""One rank, which is enough where it is about what Slurm does: each one imports torch."""

BLOCKED = """
import time


def at_step(ctx, step):
    if step == 2 and ctx.attempt == 1:
        time.sleep(300)
"""


def test_preempted_twice_and_cancelled_a_run_goes_on_on_this_machine(
    slurm: Cluster, tmp_path: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    project = Project(tmp_path, slurm.env)
    project.slow_down(attempts=3)
    project.submit(*ON_SLURM)
    (run,) = project.runs
    job = status(run)["job_id"]
    interrupt_when(run, 1, 10, lambda: slurm.preempt(job))
    interrupt_when(run, 2, 20, lambda: slurm.preempt(job))
    wait_for("some steps", lambda: step(run) >= 30, run)
    assert "cancelled at step" in project.jobkit("cancel", run.name).stdout
    assert status(run)["state"] == "cancelled"
    assert events(run)[-1]["event"] in ("interrupted", "cancelled")
    wait_for("an empty queue", lambda: not queue(slurm, project))
    assert {attempt["job_id"] for attempt in status(run)["attempts"]} == {job}
    project.submit("--local", "resources.tasks_per_node=1")
    assert causes(run) == ["preempted", "preempted", "cancelled", "finished"]
    assert [attempt["cluster"] for attempt in status(run)["attempts"]] == ["slurm"] * 3 + ["local"]
    assert weights(run) == uninterrupted(2)
    assert_each_step_once(run, STEPS, ranks=2)


def test_two_runs_that_meet_their_time_limit_are_requeued(
    slurm: Cluster, tmp_path: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    # Slurm's --signal comes up to a minute early and must not stop a run. Within one minute, its shortest limit, ranks
    # do not even start on a busy machine. Both runs at once, since each waits for its limit.
    slow, blocked = Project(tmp_path / "slow", slurm.env), Project(tmp_path / "blocked", slurm.env)
    (blocked.path / "orders.py").write_text(BLOCKED)
    limit = "resources.time=0:02:00"
    slow.submit(*ON_SLURM, limit, "params.sleep=2.2")
    blocked.submit(*ALONE, limit, "checkpoint.every=1", "params.steps=3", "name=blocked")
    (run,), (other,) = slow.runs, blocked.runs
    wait_for("the end of a run with a step longer than its margin", lambda: is_over(other), other, seconds=600)
    assert causes(other) == ["timeout", "finished"]
    assert status(other)["attempts"][1]["first_step"] == 2
    wait_for("the end of a run longer than its limit", lambda: is_over(run), run, seconds=600)
    assert causes(run)[-1] == "finished"
    assert set(causes(run)[:-1]) == {"timeout"}
    assert weights(run) == uninterrupted(2)
    assert_each_step_once(run, STEPS, ranks=2)


def test_preemption_with_a_user_signal_instead_of_sigterm(
    tmp_path: Path, uninterrupted: Callable[[int], bytes], short_dir: Path
) -> None:
    with Cluster(short_dir, **QUICK, nodes=1, user_signal=True) as cluster:
        project = Project(tmp_path, cluster.env)
        project.slow_down(attempts=1)
        project.submit(*ALONE)
        (run,) = project.runs
        interrupt_when(run, 1, 10, lambda: cluster.preempt(status(run)["job_id"]))
        wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "finished"]
    assert weights(run) == uninterrupted(1)
    assert_each_step_once(run, STEPS, ranks=1)


def test_scancel_is_final_and_leaves_a_checkpoint_with_loader_workers_too(
    slurm: Cluster, tmp_path: Path, uninterrupted: Callable[[int], bytes]
) -> None:
    project = Project(tmp_path, slurm.env)
    project.slow_down(attempts=1)
    # It has the signals blocked before it is a Python: a forked one has its rank's handlers at first.
    workers = ["params.workers=1", "params.started_by=spawn"]
    project.submit(*ALONE, *workers)
    (run,) = project.runs
    job = status(run)["job_id"]
    interrupt_when(run, 1, 10, lambda: slurm.command("scancel", job))
    wait_for("an empty queue", lambda: job not in queue(slurm, project), run)
    assert status(run)["state"] == "cancelled"
    assert "requeued" not in names(run)
    assert status(run)["checkpoint"] >= 10
    project.submit(*ALONE, *workers)
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["cancelled", "finished"]
    assert status(run)["attempts"][1]["job_id"] != job
    assert weights(run) == uninterrupted(1)
    assert_each_step_once(run, STEPS, ranks=1)


def test_a_cancel_at_the_very_start_is_final(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    project.slow_down(attempts=1)
    project.submit(*ALONE)
    (run,) = project.runs
    wait_for("an attempt", lambda: "started" in names(run), run)
    project.jobkit("cancel", run.name)
    assert status(run)["state"] == "cancelled"
    wait_for("an empty queue", lambda: not queue(slurm, project), run)
    assert "requeued" not in names(run)
