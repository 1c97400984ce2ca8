"""How a Slurm job gets into the queue again: requeued as the same job, or followed by another one.

    Decision(requeue)   -> scontrol requeue, then ExcNodeList, StartTime and Dependency
    Decision(successor) -> Submitted(new token) -> sbatch of the same script, afterany:JOB, --comment=token

The supervisor calls `start_again`, and so does an agent that has closed the attempt of a supervisor that is gone. The
journal has the decision already: a requeue ends the process that asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Sequence

from jobkit.config.machine import clean_environment
from jobkit.config.schema import Config
from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.journal import Journal
from jobkit.run.records import Cancelled, Refused, new_token
from jobkit.slurm import commands, jobs, nodes
from jobkit.slurm.jobs import Job
from jobkit.supervisor.closing import cancel_of
from jobkit.supervisor.lease import ThisJob
from jobkit.supervisor.placement import nodes_to_use
from jobkit.supervisor.retry import Decision

PAUSE_SECONDS = 5.0
"""Between two tries to reach a controller that is away. A controller that is back ends a job whose script has died: a
helper of an agent has KillWait, 30 s by default, and a question takes 9 s."""


SCANCEL_SECONDS = 1.0
"""How long a job that is requeued is watched. Slurm leaves its processes KillWait."""


def could_start_without(journal: Journal, config: Config, job: Job | None, without: Collection[str]) -> bool:
    """Return whether another start of the job would find enough nodes; False where Slurm does not answer."""
    try:
        if job is None:
            return False
        usable = nodes.usable_nodes(job.partition) - set(_excluded(journal, job, without))
        return len(usable) >= config.resources.nodes and _would_start(journal, job, without)
    except SchedulerError as error:
        log.warning("%s", error)
        return False


def start_again(
    this_job: ThisJob,
    journal: Journal,
    config: Config,
    decision: Decision,
    lost: Collection[str] = (),
    after: Sequence[str] = (),
) -> None:
    """Carry a decision out, however long the controller is away.

    Args:
        lost: nodes that Slurm may still call well
        after: ids of jobs that have to end before
    """
    is_refused = decision.action == "successor"
    while True:
        try:
            if (request := cancel_of(journal.status, journal.run)) is not None:  # it came since the attempt's end
                journal.append(Cancelled(user=request.user))
                _take_back(this_job)
                return
            job, now = jobs.show(this_job.job_id), jobs.controller_time()
            is_queued = job is not None and job.is_requeued(
                now, this_job.restart
            )  # by Slurm itself, or by an earlier try
            if job is not None and not is_queued and jobs.stop_cause(job, now) == "cancelled":
                journal.append(Cancelled(reason="scancel"))  # a job that follows would undo it, and so would a requeue
                return
            fewer = None if job is None or is_queued else _fewer_nodes(journal, config, job, lost)
            if not is_queued and (is_refused or fewer is not None):
                _submit_successor(this_job, journal, job, fewer, after, decision.pause)
            elif is_queued or jobs.requeue(this_job.job_id, this_job.restart):
                _exclude(journal, this_job, job)
                if decision.pause:
                    jobs.begin_later(this_job.job_id, decision.pause)
                if after:
                    jobs.depend(this_job.job_id, after)
                if _is_cancelled_since(this_job.job_id):
                    journal.append(Cancelled(reason="scancel"))
            else:
                journal.append(Cancelled(reason="scancel"))
            return
        except SchedulerError as error:
            log.warning("%s: %s", journal.run.name, error)
            if not commands.is_away(error):
                if is_refused:
                    journal.append(Refused(token=str(journal.status.token), error=str(error)))
                    return
                is_refused = True  # JobRequeue=0, --no-requeue
                continue
        time.sleep(PAUSE_SECONDS)


def _take_back(this_job: ThisJob) -> None:
    """End a job that is in the queue again, by Slurm itself or by an earlier try: its run is cancelled by now."""
    with contextlib.suppress(SchedulerError):  # then the job ends by itself once it starts
        job = jobs.show(this_job.job_id)
        if job is not None and job.is_requeued(jobs.controller_time(), this_job.restart):
            jobs.cancel(this_job.job_id)


def _is_cancelled_since(job_id: str) -> bool:
    """Return whether a scancel follows the requeue at once: nobody else would journal it."""
    time.sleep(SCANCEL_SECONDS)
    job = jobs.show(job_id)
    return job is not None and jobs.stop_cause(job, jobs.controller_time()) == "cancelled"


def _exclude(journal: Journal, this_job: ThisJob, job: Job | None) -> None:
    """Keep the job off the nodes that the run has given up: Slurm takes this after the requeue only."""
    given_up = journal.status.excluded_nodes
    if not given_up or job is None:
        return
    if _would_start(journal, job, ()):
        jobs.exclude_nodes(this_job.job_id, ",".join(_excluded(journal, job, ())))
    else:
        log.warning("not excluded, too few other nodes: %s", ", ".join(given_up))


def _excluded(journal: Journal, job: Job, more: Collection[str]) -> list[str]:
    """The nodes that the job may not get: a list replaces the one before, which may be the user's own."""
    return nodes.expand(",".join(filter(None, [job.excluded, *journal.status.excluded_nodes, *sorted(more)])))


def _would_start(journal: Journal, job: Job, without: Collection[str]) -> bool:
    """Return whether Slurm would ever start the job: the partition's other nodes may lack a feature of its request."""
    options = [f"--exclude={','.join(_excluded(journal, job, without))}", *_own_task(journal)]
    try:
        commands.run("sbatch", "--test-only", *options, str(journal.run.batch_script), environment=clean_environment())
    except SchedulerError as error:
        if commands.is_away(error):
            raise
        return False
    return True


def _fewer_nodes(journal: Journal, config: Config, job: Job, lost: Collection[str]) -> int | None:
    """Return a smaller number of nodes where the job would wait for ever for lost nodes; None for all of its nodes."""
    requested = len(nodes.expand(job.nodes))
    if not lost or not requested:
        return None
    usable = len(nodes.usable_nodes(job.partition) - set(_excluded(journal, job, lost)))
    fewer = nodes_to_use(config, usable)
    return fewer if usable < requested and 0 < fewer < requested else None


def _submit_successor(
    this_job: ThisJob, journal: Journal, job: Job | None, count: int | None, after: Sequence[str], later: float
) -> None:
    """Queue the run's batch script again, to start when this job has ended, and `later` seconds from now."""
    run, submitted = journal.run, journal.status.submitted
    assert submitted is not None
    with run.submit_lock() as lock:
        if submitted.token == this_job.token:
            number = submitted.number + 1
            token = new_token(run.name, number)
            following = dataclasses.replace(submitted, token=token, number=number, by="supervisor", time=0.0)
            journal.append(following)
        elif jobs.with_token(jobs.queue(), submitted.token, submitted.task):
            return  # an earlier try got through, though nobody heard the answer
        token = str(journal.status.token)
        options: list[str] = [
            f"--comment={token}",
            f"--dependency={jobs.afterany([this_job.job_id, *after])}",
            *_own_task(journal),
        ]
        if job is not None and journal.status.excluded_nodes:
            options.append(f"--exclude={','.join(_excluded(journal, job, ()))}")
        if count is not None:
            options.append(f"--nodes={count}")
        if later:
            options.append(f"--begin=now+{later:.0f}")
        # sbatch inherits the lock: if this process is killed, nobody submits the run before sbatch has ended.
        commands.submit(str(run.batch_script), *options, environment=clean_environment(), pass_fds=lock.inheritable())
    log.info("%s: a new job follows this one: %s", run.name, token)


def _own_task(journal: Journal) -> Sequence[str]:
    """The option with which sbatch takes the script of a job array for this run alone."""
    submitted = journal.status.submitted
    return [] if submitted is None or submitted.task is None else [f"--array={submitted.task}"]
