"""A sweep on a real Slurm: one array, and each of its runs is preempted, cancelled and continued by itself."""

from __future__ import annotations

from collections.abc import Callable

from harness.runs import Launch, Project, wait_until
from slurmbox import Cluster

from jobkit.run.runs import find

SWEEP = ("--cluster", "slurm", "params.steps=100000", "--sweep", "seed=range(4)")


def test_tasks_of_an_array_go_their_own_ways(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=1, cred_expire=5, preempt="requeue")
    project = on_slurm(cluster)
    project.jobkit("submit", str(project.yaml), *SWEEP)
    runs_dir = project.folder / "runs"
    (file,) = runs_dir.glob("*.sweep")
    preempted, cancelled, followed, plain = (Launch(project, run) for run in find([file.name], runs_dir))
    for launch in (preempted, cancelled, followed, plain):
        launch.wait_for_step(5)
    ids = [launch.status.job_id for launch in (preempted, cancelled, followed, plain)]
    assert ids == [f"{str(ids[0]).partition('_')[0]}_{task}" for task in range(4)]

    cluster.command("scontrol", "update", f"JobId={ids[2]}", "Requeue=0")
    project.jobkit("preempt", followed.run.name)
    project.jobkit("preempt", preempted.run.name)
    project.jobkit("cancel", "-y", str(ids[1]))
    assert (cancelled.status.state, cancelled.causes) == ("cancelled", ["cancelled"])
    plain.end_training().wait_until_over()
    followed.wait_for_attempt(2)
    job = str(followed.status.job_id)
    assert (job != ids[2], job.endswith("_2")) == (True, True)
    preempted.wait_for_attempt(2)
    assert (preempted.ends[0].next, preempted.status.job_id) == ("requeue", ids[0])
    for launch in (preempted, followed):
        launch.end_training().wait_until_over()
        assert launch.run.job_log.exists()

    project.jobkit("submit", str(project.yaml), *SWEEP)  # the cancelled one alone
    cancelled.wait_for_attempt(2).end_training().wait_until_over()
    states = [launch.status.state for launch in (preempted, cancelled, followed, plain)]
    assert states == ["finished"] * 4
    assert [len(launch.ends) for launch in (preempted, cancelled, followed, plain)] == [2, 2, 2, 1]
    wait_until(lambda: not cluster.command("squeue", "-h"), "an empty queue")
