"""The job of a run: submit it, ask whether it lives, cancel it; Slurm or this machine behind one set of functions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from filelock import Timeout

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.run import records
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.plan import LaunchPlan


def is_alive(run: RunDir, status: Status) -> bool:
    """Whether the job that the journal speaks of is queued or running; raises SchedulerError when Slurm is mute."""
    if status.job_id is None:
        return False
    if status.scheduler == "slurm":
        job = slurm.show_job(status.job_id)
        return job is not None and not job.ended
    lock = run.alive_lock()
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def current_status(run: RunDir) -> Status:
    """The run's status; where its job is gone without a last word, the journal gets one first."""
    status = run.status()
    if status.state not in (State.QUEUED, State.RUNNING) or status.submitting or is_alive(run, status):
        return status
    status = run.status()  # its last word may have come while the scheduler was asked
    if status.state not in (State.QUEUED, State.RUNNING):
        return status
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
        print(
            f"jobkit: {run.name}: its {status.state} job is gone ({cause}), which cannot be journalled: {error}",
            file=sys.stderr,
        )
    return run.status()


@dataclass(frozen=True)
class Started:
    """A job's id, and for a local one the process that controls it."""

    job_id: str
    controller: subprocess.Popen[bytes] | None = None


def is_active(run: RunDir, status: Status) -> bool:
    """Whether more will happen to the run by itself: queued, running, or about to be requeued by its job."""
    if status.state in (State.QUEUED, State.RUNNING):
        return True
    return status.state == State.INTERRUPTED and _still_ending(run, status)


def submit(plan: LaunchPlan, *, foreground: bool = False) -> Started:
    """Start a plan: a job in Slurm's queue, or a controller process on this machine."""
    if plan.scheduler == "slurm":
        from jobkit.submission.sbatch import submit as submit_slurm

        return Started(submit_slurm(plan))
    from jobkit.submission.local import start

    controller = start(plan, foreground=foreground)
    return Started(str(controller.pid), controller)


ENDING_SECONDS = 30.0
"""How long a submission waits for a job whose run has stopped already to be gone, or requeued."""


def reconcile(run: RunDir) -> Status:
    """The status, brought into line with what Slurm says; the caller holds the submission lock: none is under way.

    One that was cut off between sbatch and the journal is found in the queue by its name, which is the run's. A job
    that has stopped training but not yet ended is waited for: it may be about to requeue itself.
    Raises JobkitError when it does not end.
    """
    status = current_status(run)
    if status.submitting:
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
        status = current_status(run)
    deadline = time.monotonic() + ENDING_SECONDS
    while status.state in (State.INTERRUPTED, State.CANCELLED, State.FAILED) and _still_ending(run, status):
        if time.monotonic() > deadline:
            raise JobkitError(
                f"{run.name} is {status.state}, but its job {status.job_id} has not ended; try again later"
            )
        time.sleep(0.3)
        status = current_status(run)
    return status


def _still_ending(run: RunDir, status: Status) -> bool:
    if status.scheduler == "slurm" and not slurm.available():
        return False  # continued on a machine without Slurm: whoever is still there has lost the lease
    return is_alive(run, status)


def cancel(run: RunDir, *, wait_seconds: float = 60.0) -> Status:
    """Stop the run for good, with a checkpoint where it is running; returns its status afterwards."""
    with run.submission_lock():
        status = current_status(run)
        if status.submitting:
            status = reconcile(run)
        if not is_active(run, status):
            return status
        run.record(Event.CANCEL_REQUESTED)
    if status.state == State.RUNNING and status.attempt:
        records.write(run.stop_request_file(status.attempt.id), StopRequest(cause="cancelled"))
    if status.scheduler == "slurm" and status.job_id:
        slurm.cancel(status.job_id)
    elif is_alive(run, status):
        _signal_controller(run)
    deadline = time.monotonic() + wait_seconds
    while is_active(run, status) and time.monotonic() < deadline:
        time.sleep(0.2)
        status = current_status(run)
    if status.state == State.INTERRUPTED:
        run.record(Event.CANCELLED)  # it had stopped already when the cancel came
    return run.status()


def preempt(run: RunDir, *, grace: bool = True, wait_seconds: float = 60.0) -> Status:
    """Rehearse a preemption: the attempt that runs is stopped, and the run continues by itself as after a real one.

    Without `grace` its ranks are killed on the spot. Returns the status when that attempt has ended, or after
    `wait_seconds`. Raises JobkitError for a run that is not running.
    """
    status = current_status(run)
    attempt = status.attempt
    if status.state != State.RUNNING or attempt is None:
        raise JobkitError(f"{run.name} is {status.state}, not running: there is nothing to preempt")
    records.write(run.stop_request_file(attempt.id), StopRequest(cause="preempted", grace=None if grace else 0.0))
    if status.scheduler == "slurm" and status.job_id:
        slurm.signal_steps(status.job_id, "TERM" if grace else "KILL")  # a local supervisor finds the request
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        status = current_status(run)
        if status.attempts[attempt.id - 1].ended is not None:
            break
        time.sleep(0.2)
    return status


def _signal_controller(run: RunDir) -> None:
    lease = run.lease()
    if lease is None or lease.pid is None or lease.host != os.uname().nodename:
        where = lease.host if lease is not None else "another machine"
        raise JobkitError(f"{run.name} runs on {where}; cancel it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(lease.pid, signal.SIGTERM)
