"""A run after another one on a real Slurm, which preempts the first and gives it another job."""

from __future__ import annotations

from collections.abc import Callable

from harness.runs import Project, wait_until
from slurmbox import Cluster


def test_a_run_waits_through_a_requeue_and_another_job_of_the_run_before(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = on_slurm(cluster)
    first = project.submit("--cluster", "slurm", steps=100_000).wait_for_step(5)
    second = project.submit("--cluster", "slurm", "--after", first.run.name, steps=3)

    def job_of_second() -> str:
        return cluster.command("squeue", "-h", f"--name={second.run.name}", "--format=%T %E").strip()

    assert job_of_second().startswith(f"PENDING afterany:{first.status.job_id}")
    cluster.preempt(first.status.job_id)  # type: ignore[arg-type]
    first.wait_for_attempt(2)
    assert first.ends[0].next == "requeue"
    assert job_of_second().startswith("PENDING afterany:"), "a requeue is no end"

    before = first.status.job_id
    cluster.command("scontrol", "update", f"JobId={before}", "Requeue=0")
    project.jobkit("preempt", first.run.name)
    first.wait_for_attempt(3)
    assert first.status.job_id != before, "Slurm refuses the requeue, so another job follows"
    wait_until(lambda: f"afterany:{first.status.job_id}" in job_of_second(), "the other dependency")
    assert second.status.attempts == []

    first.end_training().wait_until_over()
    second.wait_until_over()
    assert (first.status.state, second.causes) == ("finished", ["finished"])
    times = [cluster.job(str(launch.status.job_id)) for launch in (first, second)]
    assert times[1]["StartTime"] >= times[0]["EndTime"], "without nodes until then"
    first.assert_repeated("none", "none")
