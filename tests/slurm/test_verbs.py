"""The verbs on a real Slurm: a run that waits, is cancelled, resumed, preempted, and one whose controller is away."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from harness.runs import Project, wait_until
from slurmbox import Cluster

from jobkit.run.journal import Journal
from jobkit.run.records import Finished


def _status(project: Project, name: str) -> dict[str, Any]:
    return dict(json.loads(project.jobkit("status", name, "--json").stdout))


def test_a_run_waits_is_cancelled_resumed_preempted_and_cancelled(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """One run through every verb. The hold keeps its first job in the queue."""
    slurm = make_slurm(nodes=2, cred_expire=5)  # a requeued job waits seconds, not two minutes
    project = on_slurm(slurm)
    launch = project.submit("--cluster", "slurm", "clusters.slurm.hold=true", steps=100_000)
    name = launch.run.name

    waiting = _status(project, name)
    (row,) = json.loads(project.jobkit("list", "--json").stdout)
    assert (waiting["state"], row["state"], row["waits"]) == ("queued", "queued", "JobHeldUser")
    assert row["job"] == waiting["job_id"] and f"scontrol release {row['job']}" in waiting["words"]
    assert _status(project, row["job"])["run"] == name  # only the job's comment says whose it is

    project.jobkit("cancel", name)
    assert launch.status.state == "cancelled" and launch.status.attempts == []
    assert slurm.job(row["job"])["JobState"] == "CANCELLED"

    resumed = project.start("resume", name, "--follow")
    job = wait_until(lambda: _status(project, name).get("job_id"), "the second job")
    slurm.command("scontrol", "release", job)  # its config holds it again
    launch.wait_for_attempt(1)
    assert [row["state"] for row in json.loads(project.jobkit("list", job, "--json").stdout)] == ["running"]

    project.jobkit("preempt", name)
    launch.wait_for_attempt(2)
    assert launch.causes == ["preempted"]
    follower = project.start("logs", "-f", name)
    project.jobkit("cancel", name)
    assert (launch.status.state, launch.causes) == ("cancelled", ["preempted", "cancelled"])
    assert (follower.wait(), resumed.wait(), project.jobkit("wait", name, check=False).returncode) == (75, 75, 75)
    launch.assert_repeated("none")
    (*_, last) = (launch.run.outputs / "steps").read_text().split()
    assert launch.run.durable_step() == int(last) + 1, "it saved before it ended"


def test_scancel_of_a_waiting_job_leaves_a_lost_run(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm)
    launch = project.submit("--cluster", "slurm", "clusters.slurm.hold=true")
    slurm.command("scancel", _status(project, launch.run.name)["job_id"])
    lost = _status(project, launch.run.name)
    assert (lost["state"], lost["answered"]) == ("lost", True) and "CANCELLED" in lost["words"]
    assert project.jobkit("wait", launch.run.name, check=False).returncode == 75
    project.jobkit("cancel", launch.run.name)
    assert launch.status.state == "cancelled"


def test_verbs_while_the_controller_is_away(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """What the run directory says is shown, with a warning; a running run is cancelled by its directory."""
    slurm = make_slurm(nodes=1)
    project = on_slurm(slurm)
    held = project.submit("--cluster", "slurm", "clusters.slurm.hold=true", "seed=2")
    done = project.submit("--cluster", "slurm", "clusters.slurm.hold=true", "seed=3")
    launch = project.submit("--cluster", "slurm", steps=100_000).wait_for_step(1)
    slurm.stop_controller()
    Journal(done.run).append(Finished(result={"loss": 1.0}))

    listed = project.jobkit("list", "--json")
    assert {row["run"]: row["state"] for row in json.loads(listed.stdout)} == {
        held.run.name: "queued",
        done.run.name: "finished",
        launch.run.name: "running",
    }
    assert "what follows is what the run directories say" in listed.stderr
    cancelled = project.jobkit("cancel", "-y", held.run.name, launch.run.name, check=False)
    assert (cancelled.returncode, held.status.state, launch.status.state) == (1, "queued", "cancelled")
    slurm.start_controller()
    project.jobkit("cancel", held.run.name)
    assert held.status.state == "cancelled"


def test_doctor_tries_a_held_job_and_removes_it(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm)
    text = project.jobkit("doctor").stdout
    assert all(words in text for words in ("keeps its comment", "PreemptMode=", "locks work"))
    jobs = slurm.command("squeue", "--noheader", "--name=jobkit-doctor", "--states=PENDING,RUNNING", "--format=%i")
    assert jobs.split() == []
