"""What Slurm's record of a real job says."""

from __future__ import annotations

from pathlib import Path

from slurm_cluster import Cluster, wait_until

from jobkit.slurm import parse_job, stop_cause


def test_the_record_of_a_real_job_says_why_it_is_being_stopped(slurm: Cluster, tmp_path: Path) -> None:
    def cause(job: str) -> str | None:
        return stop_cause(parse_job(slurm.command("scontrol", "--oneliner", "show", "job", job)), 12.0)

    stubborn = "--wrap=srun sh -c 'trap : TERM; while true; do sleep 1; done'"
    place = ["sbatch", "--parsable", "--output=/dev/null", f"--chdir={tmp_path}", "--partition=low", "--nodes=1"]
    jobs = [slurm.command(*place, "--exclusive", "--time=5", stubborn) for _ in range(2)]
    for job in jobs:
        wait_until(lambda job=job: slurm.job(job)["JobState"] == "RUNNING", f"job {job} to run")
        # Its last step is what holds it in COMPLETING later on.
        wait_until(lambda job=job: slurm.command("squeue", "-h", "-s", f"--job={job}"), f"a step of job {job}")
        assert cause(job) is None
    preempted, cancelled = jobs
    slurm.preempt(preempted)
    wait_until(lambda: cause(preempted) is not None, "the preemption")
    assert cause(preempted) == "preempted"
    slurm.command("scancel", cancelled)
    assert cause(cancelled) == "cancelled"
    slurm.command("scancel", preempted)
