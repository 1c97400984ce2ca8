"""Runs that wait on Slurm for others: what their jobs depend on, whenever a job of those others is another one.

Slurm follows jobs, and a dependency `afterany` is met when the job has ended for good; a requeue does not meet it. When
the run goes on in a new job, or ends after its dependents were held, somebody has to tell Slurm.
"""

from __future__ import annotations

import contextlib

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run.dependencies import Verdict, dependents, verdict
from jobkit.run.rundir import RunDir
from jobkit.run.status import State

HELD_BY_US = ("job_requeued_in_held_state", "JobHeldUser")
"""Slurm's words for a job that was requeued as held, and for one that was submitted so."""


def dependency_of(found: Verdict) -> str:
    """What a job depends on that waits for these runs, as sbatch takes it; empty where no job is known."""
    jobs = [status.job_id for _, status in found.unfinished if status.scheduler == "slurm" and status.job_id]
    return ",".join(f"afterany:{job}" for job in jobs)


def tell_dependents(run: RunDir) -> None:
    """Let the jobs of those that come after a run wait for what it is in now, or start where it has come to an end.

    What cannot be told now, they find out when they start. Never raises.
    """
    with contextlib.suppress(OSError):
        for other in dependents(run):
            try:
                _tell(other)
            except (JobkitError, OSError) as error:
                log.warning("%s comes after %s, and its job could not be told: %s", other.name, run.name, error)


def _tell(run: RunDir) -> None:
    status = run.status()
    if status.state != State.QUEUED or status.scheduler != "slurm" or status.job_id is None:
        return
    if not slurm.available() or status.slurm_cluster != slurm.cluster():
        return
    found = verdict(run, run.config().after)
    has_jobs = found.are_under_way and all(other.scheduler == "slurm" for _, other in found.unfinished)
    if found.unfinished and not found.ends and not has_jobs:
        return  # it is held until somebody continues those
    job = slurm.show_job(status.job_id)
    if job is None or job.state != "PENDING" or not job.runs(run.batch_script):
        return
    depend(status.job_id, "" if found.ends else dependency_of(found))
    if job.held and job.reason in HELD_BY_US and status.held_for_others:
        slurm.release(status.job_id)
    if job.restarts:
        with contextlib.suppress(SchedulerError):
            start_now(status.job_id)


def start_now(job_id: str) -> None:
    """Take away what a requeued job waits for without a reason: 121 s, by Slurm's default. Raises SchedulerError."""
    slurm.command("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def depend(job_id: str, dependency: str) -> None:
    """Replace what a job in the queue depends on. Raises SchedulerError."""
    slurm.command("scontrol", "update", f"JobId={job_id}", f"Dependency={dependency}")
