"""Runs that wait on Slurm for others: what their jobs depend on, whenever a job of those others is another one.

Slurm follows jobs, and a dependency `afterany` is met when the job has ended for good; a requeue does not meet it. When
the run goes on in a new job, or ends after its dependents were held, somebody has to tell Slurm.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run.dependencies import Verdict, dependents, runs_before, verdict
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status

HELD_BY_US = ("job requeued in held state", "JobHeldUser")
"""Slurm's words for a job that was requeued as held, and for one that was submitted so."""


def dependency_of(found: Verdict) -> str:
    """What a job depends on that waits for these runs, as sbatch takes it; empty where no job is known."""
    jobs = [status.job_id for _, status in found.unfinished if status.scheduler == "slurm" and status.job_id]
    return ",".join(f"afterany:{job}" for job in jobs)


def tell_dependents(run: RunDir) -> None:
    """Let the jobs of those that come after a run wait for what it is in now, or start where it has come to an end.

    There may be a thousand: Slurm is asked once about all of them, and told by few commands. Harmless to repeat. What
    cannot be told now, they find out when they start. Never raises.
    """
    try:
        if waiting := list(_waiting(run)):
            _tell(waiting)
    except (JobkitError, OSError) as error:
        log.warning("what comes after %s could not be told: %s", run.name, error)


@dataclass(frozen=True)
class _Waiting:
    """A run in the queue of the Slurm here."""

    run: RunDir
    status: Status
    job_id: str
    dependency: str
    """What its job is to wait for; empty where it is to start."""


def _waiting(run: RunDir) -> Iterator[_Waiting]:
    """Those that come after a run, but for those that are held until somebody continues what they wait for."""
    for other in dependents(run):
        try:
            status = other.status()
            is_queued = status.state == State.QUEUED and status.scheduler == "slurm" and slurm.available()
            if not is_queued or status.job_id is None or status.slurm_cluster != slurm.cluster():
                continue
            found = verdict(other, status.after)
        except OSError as error:
            log.warning("%s comes after %s, and its job could not be told: %s", other.name, run.name, error)
            continue
        has_jobs = found.are_under_way and all(one.scheduler == "slurm" for _, one in found.unfinished)
        if found.ends or not found.unfinished or has_jobs:
            yield _Waiting(other, status, status.job_id, "" if found.ends else dependency_of(found))


def _tell(waiting: Sequence[_Waiting]) -> None:
    """Change the jobs of runs that wait. Raises SchedulerError where Slurm is away."""
    jobs = {job.job_id: job for job in slurm.jobs_of([_user()]) if job.state == "PENDING"}
    told = [one for one in waiting if one.job_id in jobs and jobs[one.job_id].runs(one.run.batch_script)]
    by_dependency: dict[str, list[str]] = {}
    for one in told:
        words = ",".join(filter(None, (one.dependency, *_beside(one, jobs[one.job_id].dependency))))
        by_dependency.setdefault(words, []).append(one.job_id)
    done = {job for words, ids in by_dependency.items() for job in depend(ids, words)}
    told = [one for one in told if one.job_id in done]
    # Only now: they would start.
    held = [one.job_id for one in told if one.status.held_for_others and jobs[one.job_id].reason in HELD_BY_US]
    _for_all(held, lambda ids: ["release", ids])
    start_now([one.job_id for one in told if one.status.waiting])


def _beside(one: _Waiting, dependency: str) -> Iterator[str]:
    """What a job waits for besides the runs that its own comes after: what its user wrote, and a sweep's limit."""
    before = [run.status() for run in runs_before(one.run, one.status.after)]
    known = {job for status in before for job in (status.job_id, *(attempt.job_id for attempt in status.attempts))}
    for part in filter(None, dependency.split(",")):
        kind, *jobs = part.split(":")
        left = [job for job in jobs if kind != "afterany" or job not in known]
        if left or not jobs:
            yield ":".join([kind, *left])


def _user() -> str:
    """This process's user, as Slurm's commands take it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # one that this machine does not know
        return str(os.getuid())


def start_now(job_ids: Sequence[str]) -> None:
    """Take away what requeued jobs wait for without a reason: 121 s, by Slurm's default. Raises SchedulerError where
    Slurm is away."""
    _for_all(job_ids, lambda ids: ["update", f"JobId={ids}", "StartTime=now"])


def depend(job_ids: Sequence[str], dependency: str) -> list[str]:
    """Replace what jobs in the queue depend on; returns the ids of those of which Slurm has taken it. Raises
    SchedulerError where Slurm is away."""
    return _for_all(job_ids, lambda ids: ["update", f"JobId={ids}", f"Dependency={dependency}"])


def _for_all(job_ids: Sequence[str], words: Callable[[str], Sequence[str]]) -> list[str]:
    """Run scontrol for jobs, many at once; returns the ids of those for which it has done what it was told."""
    if len(job_ids) > slurm.IDS_OF_A_COMMAND:
        first, rest = job_ids[: slurm.IDS_OF_A_COMMAND], job_ids[slurm.IDS_OF_A_COMMAND :]
        return [*_for_all(first, words), *_for_all(rest, words)]
    if not job_ids:
        return []
    try:
        slurm.command("scontrol", *words(",".join(job_ids)))
    except SchedulerError as error:
        if slurm.is_away(error):
            raise
        if len(job_ids) > 1:  # of which one it was is not sure
            return [job for one in job_ids for job in _for_all([one], words)]
        log.warning("job %s: %s", job_ids[0], error)
        return []
    return list(job_ids)
