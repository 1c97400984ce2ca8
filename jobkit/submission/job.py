"""The job of a run: submit it, ask whether it lives, cancel it; Slurm or this machine behind one set of functions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run import records
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.plan import LaunchPlan


def is_alive(run: RunDir, status: Status) -> bool:
    """Whether the job that the journal names is queued or running; raises SchedulerError when Slurm does not answer.

    A local one counts as alive where its lock may not be looked at: the journal says so.
    """
    if status.job_id is None:
        return False
    if status.scheduler == "slurm":
        job = slurm.show_job(status.job_id)
        return job is not None and not job.ended
    return run.has_local_supervisor() is not False


def update_status(run: RunDir) -> Status:
    """The run's status; an end of its job that nobody in the job could record is recorded first."""
    status = run.status()
    if status.submitting or not _is_under_way(status) or is_alive(run, status):
        return status
    status = run.status()  # read again: its end may have been recorded while the scheduler was asked
    if not _is_under_way(status):
        return status
    # Slurm forgets a job MinJobAge, 300 s by default, after its end: then it is lost, and nobody can say why.
    job = slurm.show_job(status.job_id) if status.scheduler == "slurm" and status.job_id else None
    cause = (slurm.stop_cause(job) if job else None) or "lost"
    attempt = status.attempt.id if status.attempt and status.state == State.RUNNING else None
    try:
        if cause == "cancelled" or status.cancel_requested:
            run.record(Event.CANCELLED, attempt=attempt)
        elif attempt is not None:
            run.record(Event.INTERRUPTED, attempt=attempt, cause=cause)
        else:
            run.record(Event.REQUEUE_FAILED, error=f"job {status.job_id} left the queue without having run ({cause})")
    except OSError as error:  # a full disk, or somebody else's run
        log.warning(f"{run.name}: its {status.state} job is gone ({cause}), which cannot be journalled: {error}")
    return run.status()


def _is_under_way(status: Status) -> bool:
    return status.state in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True)
class Started:
    """A job's id, and for a local one its supervisor's process."""

    job_id: str
    supervisor: subprocess.Popen[bytes] | None = None


def is_active(run: RunDir, status: Status) -> bool:
    """Whether more will happen to the run by itself: queued, running, or about to be requeued by its job."""
    if _is_under_way(status):
        return True
    return status.state == State.INTERRUPTED and _still_ending(run, status)


def submit(plan: LaunchPlan, *, foreground: bool = False) -> Started:
    """Start a plan: a job in Slurm's queue, or a supervisor on this machine."""
    if plan.scheduler == "slurm":
        from jobkit.submission.sbatch import submit as submit_slurm

        return Started(submit_slurm(plan))
    from jobkit.submission.local import start

    supervisor = start(plan, foreground=foreground)
    return Started(str(supervisor.pid), supervisor)


ENDING_SECONDS = 30.0
"""How long a submission waits for a job whose run has stopped already to be gone, or requeued: what follows srun in the
batch script starts Python and asks slurmctld, and KillWait, 30 s by default, is what Slurm gives it at a time limit."""

STOP_SECONDS = 60.0
"""How long cancelling and preempting wait for the last checkpoint: twice KillWait, in which Slurm lets it end."""

POLL_SECONDS = 0.3
"""Between two looks at a job that is ending. Each asks slurmctld, which serves one request at a time."""


def reconcile(run: RunDir) -> Status:
    """The status, once the journal agrees with the scheduler; the caller holds the submission lock.

    A submission that was cut off between sbatch and the journal is completed, and a job that has stopped training but
    not yet ended is waited for: it may be about to requeue itself. Raises JobkitError when it does not end.
    """
    status = update_status(run)
    if status.submitting:  # by nobody who lives: the lock is held here
        _complete_submission(run, status)
        status = update_status(run)

    def has_ended(status: Status) -> bool:
        ending = status.state in (State.INTERRUPTED, State.CANCELLED, State.FAILED)
        return not (ending and _still_ending(run, status))

    status = wait(run, status, has_ended, ENDING_SECONDS)
    if not has_ended(status):
        raise JobkitError(f"{run.name} is {status.state}, but its job {status.job_id} has not ended; try again later")
    return status


def wait(run: RunDir, status: Status, done: Callable[[Status], bool], seconds: float) -> Status:
    """The first status that is `done`, or the one after so many seconds."""
    deadline = time.monotonic() + seconds
    while not done(status) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        status = update_status(run)
    return status


def _complete_submission(run: RunDir, status: Status) -> None:
    """Record how a submission that was cut off went: its job, if there is one, has the run's name in the queue."""
    try:
        found = slurm.jobs_named(run.name) if status.scheduler == "slurm" else []
    except SchedulerError as error:
        raise SchedulerError(
            f"an earlier submission of {run.name} was cut off, and only Slurm knows whether it is queued: {error}. "
            "Repeat this where Slurm answers, or start a new run with --fresh"
        ) from None
    if found:
        run.record(Event.SUBMITTED, job_id=found[0])
    else:
        run.record(Event.SUBMIT_FAILED, error="the submission was cut off")


def _still_ending(run: RunDir, status: Status) -> bool:
    if status.scheduler == "slurm" and not slurm.available():
        return False  # continued on a machine without Slurm: what still runs there has lost the lease
    return is_alive(run, status)


def cancel(run: RunDir) -> Status:
    """Stop the run for good, with a checkpoint where it is running; returns its status afterwards."""
    with run.submission_lock():
        status = update_status(run)
        if status.submitting:
            status = reconcile(run)
        if not is_active(run, status):
            return status
        run.record(Event.CANCEL_REQUESTED)
    if status.state == State.RUNNING and status.attempt:
        # Before Slurm's signal, which to a rank looks like a preemption's until slurmctld says that it is none.
        records.write(run.stop_request_file(status.attempt.id), StopRequest(cause="cancelled"))
    if status.scheduler == "slurm" and status.job_id:
        slurm.cancel(status.job_id)  # leaves the ranks KillWait, 30 s by default, to save
    elif is_alive(run, status):
        _signal_supervisor(run)
    status = wait(run, status, lambda now: not is_active(run, now), STOP_SECONDS)
    if status.state == State.INTERRUPTED:
        run.record(Event.CANCELLED)  # it had stopped already when the cancel came
    return run.status()


def preempt(run: RunDir, *, grace: bool = True) -> Status:
    """Rehearse a preemption: the attempt that runs is stopped, and the run continues by itself as after a real one.

    Without `grace` its ranks are killed on the spot. Returns the status when that attempt has ended, or after
    STOP_SECONDS. Raises JobkitError for a run that is not running.
    """
    status = update_status(run)
    attempt = status.attempt
    if status.state != State.RUNNING or attempt is None:
        raise JobkitError(f"{run.name} is {status.state}, not running: there is nothing to preempt")
    # Its supervisor finds the request.
    records.write(run.stop_request_file(attempt.id), StopRequest(cause="preempted", grace=None if grace else 0.0))
    return wait(run, status, lambda now: now.attempts[attempt.id - 1].ended is not None, STOP_SECONDS)


def _signal_supervisor(run: RunDir) -> None:
    lease = run.lease()
    if lease is None or lease.pid is None or lease.host != os.uname().nodename:
        where = lease.host if lease is not None else "another machine"
        raise JobkitError(f"{run.name} runs on {where}; cancel it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(lease.pid, signal.SIGTERM)
