"""The job of a run: submit it, record what became of it, cancel it; Slurm or this machine behind one set of functions.

Only a submission, or a cancel, records the end of a job that nobody in the job could record: `settle`, under the lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from filelock import FileLock

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run import processes, records, sweeps
from jobkit.run.events import Event
from jobkit.run.locks import held_by_children
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, State, Status
from jobkit.submission.observer import (
    ASK_SECONDS,
    FindJob,
    ask,
    can_be_asked,
    end_of,
    is_gone,
    is_here,
    observe,
)
from jobkit.submission.plan import LaunchPlan

if TYPE_CHECKING:
    from jobkit.submission.sbatch import Batch

POLL_SECONDS = 0.3
"""Between two looks at the files of a run that is ending."""

ENDING_SECONDS = 30.0
"""How long a submission waits for a job whose run has stopped already to be gone, or requeued: what follows srun in the
batch script starts Python and asks slurmctld, and KillWait, 30 s by default, is what Slurm gives it at a time limit."""

STOP_SECONDS = 60.0
"""How long preempting waits for the last checkpoint: twice KillWait, in which Slurm lets a preempted job end."""

CANCEL_SECONDS = 600.0
"""What the ranks of a cancelled run get to save: nobody else waits for their nodes, as after a preemption."""

CLEAN_UP_SECONDS = 15.0
"""What a cancelled job gets for its `teardown` when its ranks have ended."""


# Submitting


@dataclass(frozen=True)
class Started:
    """A job's id, and for a local one its supervisor's process."""

    job_id: str
    supervisor: subprocess.Popen[bytes] | None = None


def submit(plan: LaunchPlan, lock: FileLock, *, foreground: bool = False) -> Started:
    """Start a plan: a job in Slurm's queue, or a supervisor on this machine; `lock` is the run's submission lock."""
    if plan.scheduler == "slurm":
        from jobkit.submission.sbatch import Batch

        (job_id,) = submit_batch(Batch([plan]), [lock])
        return Started(job_id)
    from jobkit.submission.local import start

    supervisor = start(plan, foreground=foreground)
    return Started(str(supervisor.pid), supervisor)


def submit_batch(batch: Batch, locks: Sequence[FileLock]) -> list[str]:
    """Put a batch into Slurm's queue; returns the ids of its jobs. `locks` are the submission locks of its runs."""
    from jobkit.submission import sbatch

    # sbatch may queue the job after this process was killed: until it has ended nobody may look whether it did.
    return sbatch.submit(batch, [file for lock in locks for file in held_by_children(lock)])


def settle(run: RunDir, find_job: FindJob = ask) -> Status:
    """`observe`, and record what it found to be the end; the caller holds the submission lock."""
    status = observe(run, find_job)
    if status.probably is None:
        return status
    now = run.status()  # again: its end may have been recorded since, or the next job may have begun
    if not now.state.is_under_way or now.start != status.start:
        return now
    event, fields = end_of(run, now, status.probably)
    try:
        run.record(event, **fields)
    except OSError as error:
        log.warning(f"{run.name}: its job is gone ({status.probably}), which cannot be journalled: {error}")
    return run.status()


def reconcile(run: RunDir, *, in_sweep: bool = False) -> Status:
    """The status, once the journal agrees with the scheduler; the caller holds the submission lock.

    A submission that was cut off between sbatch and the journal is completed, and a job that has stopped training but
    not yet ended is waited for: it may be about to requeue itself. Raises JobkitError when it does not end. `in_sweep`
    is whether the caller submits a sweep, so that nobody else does.
    """
    status = settle(run)
    if status.submitting and status.sweep and not in_sweep:
        sweeps.wait_until_submitted(run.path.parent)
        status = settle(run)
    if status.submitting:  # by nobody who lives: the lock is held here
        _complete_submission(run, status)
        status = settle(run)
    if status.cancel_requested and status.state.is_under_way:
        status = _carry_out_cancel(run, status)
    for pause in growing(ENDING_SECONDS):
        if status.state not in (State.INTERRUPTED, State.CANCELLED, State.FAILED) or is_gone(run, status):
            return status
        time.sleep(pause)
        status = settle(run)  # it may have been requeued
    job = slurm.show_job(str(status.job_id)) if status.scheduler == "slurm" else None
    if job is not None and job.state == "COMPLETING":
        # A node that does not answer keeps it so for hours. What is left of it has no lease once the next one begins.
        log.warning("job %s is still completing on %s; the run goes on without it", status.job_id, job.nodes)
        return status
    raise JobkitError(f"{run.name} is {status.state}, but its job {status.job_id} has not ended; try again later")


def _carry_out_cancel(run: RunDir, status: Status) -> Status:
    """End a job in the queue whose cancel was journalled and then cut off. Raises JobkitError for a run that trains."""
    if status.state == State.RUNNING:
        attempt = status.attempt
        if attempt is not None and attempt.ended is None and run.stop_request(attempt.id) is None:
            # Its ranks have not heard of it: what they get to save begins now.
            seconds = CANCEL_SECONDS if status.cancel_grace is None else status.cancel_grace
            run.record(Event.CANCEL_REQUESTED, grace=seconds)
            tell_ranks(run, status, attempt, seconds)
            log.warning("%s: a cancel of it was cut off, and is carried out now", run.name)
        raise JobkitError(
            f"{run.name} is being cancelled (job {status.job_id}); the same command continues it when it has ended"
        )
    if status.scheduler == "slurm":
        end_slurm_job(run, status)
    return settle(run)


def growing(seconds: float) -> Iterator[float]:
    """Pauses that grow, of so many seconds in all: whoever waits for long need not know at once."""
    until, pause = time.monotonic() + seconds, POLL_SECONDS
    while time.monotonic() < until:
        yield min(pause, max(0.0, until - time.monotonic()))
        pause = min(2 * pause, ASK_SECONDS)


def _complete_submission(run: RunDir, status: Status) -> None:
    """Record how a submission that was cut off went: its job, if there is one, has the run's batch script."""
    found: list[str] = []
    if status.scheduler == "slurm":
        try:
            if status.slurm_cluster is not None and not is_here(status):
                raise SchedulerError(f"it was made on {status.slurm_cluster}, which is another Slurm than this one")
            found = slurm.jobs_with(run.batch_script, run.array_task)
        except SchedulerError as error:
            raise SchedulerError(
                f"an earlier submission of {run.name} was cut off, and only its Slurm knows whether it is queued: "
                f"{error}. Repeat this where that Slurm answers, or start a new run with --fresh"
            ) from None
    if found:
        run.record(Event.SUBMITTED, job_id=found[0])
    else:
        run.record(Event.SUBMIT_FAILED, error="the submission was cut off")


def release(status: Status) -> bool:
    """Let the run's job start where Slurm holds it; False where it does not. Raises SchedulerError."""
    if status.state != State.HELD or status.job_id is None:
        return False
    slurm.release(status.job_id)
    return True


# Stopping


def wait_until_gone(run: RunDir, status: Status, seconds: float) -> bool:
    """Whether the job of a status has ended within so many seconds. Raises SchedulerError."""
    for pause in growing(seconds):
        if is_gone(run, status):
            return True
        time.sleep(pause)
    return False


def job_of(status: Status, find_job: FindJob = ask) -> slurm.JobInfo | None:
    """The run's job, where Slurm here knows it; raises SchedulerError."""
    return find_job(status.job_id) if status.job_id is not None and can_be_asked(status) else None


def tell_ranks(run: RunDir, status: Status, attempt: Attempt, seconds: float) -> str | None:
    """Let the ranks of an attempt save, for so many seconds, and end; returns the machine they are on where it is none
    that can be told from here."""
    # Not by Slurm's scancel, which leaves them KillWait, 30 s by default: the supervisor signals them.
    try:
        records.write(run.stop_request_file(attempt.id), StopRequest(cause="cancelled", grace=seconds))
    except OSError as error:
        log.warning("%s; the ranks are signalled instead", error)
        if status.scheduler == "slurm" and can_be_asked(status):
            slurm.signal_steps(str(status.job_id), "TERM")
    # A script with jobkit.init does not look for requests.
    return None if status.scheduler == "slurm" else signal_supervisor(run, grace=seconds > 0)


def if_slurm_answers(look: Callable[[RunDir], Status], run: RunDir) -> Status:
    """What `look` returns; of a run that trains what its files say where Slurm is away: its supervisor can be told."""
    try:
        return look(run)
    except SchedulerError as error:
        status = run.status()
        if status.state != State.RUNNING:
            raise
        log.warning("%s; the run is told through its directory", error)
        return status


def end_slurm_job(run: RunDir, status: Status, find_job: FindJob = ask) -> None:
    """End the job of a run whose cancel is journalled; the caller holds the submission lock. Raises SchedulerError."""
    if status.state in (State.FINISHED, State.FAILED):
        return  # before it could be cancelled: its job ends by itself, with all the time that its teardown takes
    job = job_of(status, find_job)
    if job is None or not job.runs(run.batch_script):
        # On another cluster: its job finds it so when it starts, and ends. One that runs has had its time by now, and
        # once the run is continued what is left of it has no lease.
        if status.state.is_under_way:
            event, fields = end_of(run, status, "cancelled")
            run.record(event, **fields)
        return
    if status.state == State.CANCELLED and wait_until_gone(run, status, CLEAN_UP_SECONDS):  # its teardown may run
        return
    if job.ended:
        return
    slurm.cancel(job.job_id)
    if status.state != State.CANCELLED:
        wait_until_gone(run, status, STOP_SECONDS)  # what has become of it is not journalled yet


def preempt(run: RunDir, *, grace: bool = True) -> Attempt:
    """Rehearse a preemption: the attempt that runs is stopped, and the run continues by itself as after a real one.

    Without `grace` its ranks are killed on the spot. Returns that attempt when it has ended, or after STOP_SECONDS.
    Raises JobkitError for a run that is not running.
    """
    status = if_slurm_answers(observe, run)
    attempt = status.attempt
    if status.state != State.RUNNING or attempt is None:
        raise JobkitError(f"{run.name} is {status.state}, not running: there is nothing to preempt")
    # Its supervisor finds the request.
    records.write(run.stop_request_file(attempt.id), StopRequest(cause="preempted", grace=None if grace else 0.0))
    deadline = time.monotonic() + STOP_SECONDS
    while (now := run.status().attempts[attempt.id - 1]).ended is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return now


def signal_supervisor(run: RunDir, *, grace: bool) -> str | None:
    """Tell a local run's supervisor to stop, or to kill; where that is on another machine, the name of it."""
    lease = run.lease()
    if lease is None or lease.process is None:
        return (lease.host if lease is not None else None) or "another machine"
    pid = processes.seen_here(lease.process)
    if pid is None:
        is_container = lease.host == os.uname().nodename  # its processes have other numbers here, which others have too
        return f"{lease.host}, in another container" if is_container else str(lease.host)
    if not processes.is_gone(lease.process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if grace else signal.SIGINT)
    return None
