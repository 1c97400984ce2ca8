"""The job of a run: submit it, ask whether it lives, cancel it; Slurm or this machine behind one set of functions.

Whoever looks from outside writes nothing: `observe` says what is probable. Only a submission, under its lock, records
the end of a job that nobody in the job could record (`settle`). A job is asked about where it is, and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run import records
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status, apply
from jobkit.submission.plan import LaunchPlan

ASK_SECONDS = 10.0
"""How often one run's job is asked about: all share a slurmctld, which answers one request at a time. The run's own
files say the rest sooner."""

LIST_SECONDS = 2.0
"""How long a list of all runs waits for a controller that does not answer."""

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

_UNDER_WAY = (State.QUEUED, State.HELD, State.RUNNING)


# Looking


def observe(run: RunDir) -> Status:
    """The run's status as it is now, its job's state included; nothing is written. Raises SchedulerError."""
    status = run.status()
    if not _is_asked_about(status):
        return status
    if status.scheduler != "slurm":
        return status if _has_supervisor(run) else _with_end(run, None)
    job = slurm.show_job(str(status.job_id))
    return _with_job(run, status, job)


def observe_all(found: Sequence[tuple[RunDir, Status]]) -> list[Status]:
    """As `observe` of many runs whose status was read, with one question to Slurm; raises SchedulerError."""
    on_slurm = [run for run, status in found if status.scheduler == "slurm" and _is_asked_about(status, LIST_SECONDS)]
    jobs: Mapping[str, slurm.JobInfo] = {}
    if on_slurm:
        jobs = {job.job_id: job for job in slurm.jobs_of(_owners(on_slurm), LIST_SECONDS)}

    def one(run: RunDir, status: Status) -> Status:
        if not _is_asked_about(status, LIST_SECONDS):
            return status
        if status.scheduler != "slurm":
            return status if _has_supervisor(run) else _with_end(run, None)
        return _with_job(run, status, jobs.get(str(status.job_id)))

    return [one(run, status) for run, status in found]


def _owners(runs: Sequence[RunDir]) -> set[str]:
    """Who the runs belong to, and so their jobs, as Slurm's commands take it."""
    uids = {run.path.stat().st_uid for run in runs}
    names = set()
    for uid in uids:
        try:
            names.add(pwd.getpwuid(uid).pw_name)
        except KeyError:  # a user that this machine does not know
            names.add(str(uid))
    return names


class Observer:
    """One run, looked at again and again: its files each time, its scheduler at most every ASK_SECONDS."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.is_over = False
        """Whether nothing more will happen to the run by itself."""
        self._ask_at = 0.0
        self._seen: Status | None = None

    def look(self) -> Status:
        """The status now; raises SchedulerError where Slurm was asked and did not answer."""
        status = self.run.status()
        if status.state in (State.FINISHED, State.FAILED, State.CANCELLED):
            self.is_over = True
            return status
        if time.monotonic() >= self._ask_at or status.scheduler != "slurm":
            self._ask_at = time.monotonic() + ASK_SECONDS
            self._seen = observe(self.run)
            self.is_over = not is_active(self.run, self._seen)
            return self._seen
        if self._seen is not None and status.state == State.QUEUED and self._seen.job_id == status.job_id:
            status.waits_for = self._seen.waits_for
            status.state = State.HELD if self._seen.state == State.HELD else State.QUEUED
        return status


def _is_asked_about(status: Status, timeout: float = slurm.ANSWER_SECONDS) -> bool:
    """Whether the job of a run that is under way can be asked about from here. Raises SchedulerError."""
    if status.submitting or status.state not in _UNDER_WAY or status.job_id is None:
        return False
    return status.scheduler != "slurm" or is_here(status, timeout)


def is_here(status: Status, timeout: float = slurm.ANSWER_SECONDS) -> bool:
    """Whether the Slurm that commands here talk to is the one that has the run's job: ids of two clusters collide."""
    return slurm.available() and status.slurm_cluster == slurm.cluster(timeout)


def _has_supervisor(run: RunDir) -> bool:
    """Whether a local run's supervisor lives; where its lock may not be looked at, what the journal says holds."""
    return run.has_local_supervisor() is not False


def _with_job(run: RunDir, status: Status, job: slurm.JobInfo | None) -> Status:
    """The status of a run whose job Slurm has told about."""
    if job is not None and not job.runs(run.batch_script):
        return status  # ours is gone, or on a cluster of the same name: nothing is certain
    if job is None or job.ended:
        return _with_end(run, job)
    if job.state == "PENDING":
        status.waits_for = None if job.reason in ("", "None") else job.reason
        status.state = State.HELD if job.held else State.QUEUED  # Slurm itself may have put it back
    return status


def _with_end(run: RunDir, job: slurm.JobInfo | None) -> Status:
    """The status of a run whose job has ended, which nobody in it could record."""
    status = run.status()  # again: its end may have been recorded while the scheduler was asked
    if status.submitting or status.state not in _UNDER_WAY:
        return status
    cause = _cause_of_end(job)
    event, fields = _end_of(status, cause)
    apply(status, {"time": time.time(), "event": event, **fields})
    status.probably = cause
    return status


def _cause_of_end(job: slurm.JobInfo | None) -> str:
    # Slurm forgets a job MinJobAge, 300 s by default, after its end: then it is lost, and nobody can say why.
    return (slurm.stop_cause(job) if job else None) or "lost"


def _end_of(status: Status, cause: str) -> tuple[Event, dict[str, Any]]:
    """The event that says how a run under way ended whose job is gone."""
    attempt = status.attempt.id if status.attempt and status.state == State.RUNNING else None
    if cause == "cancelled" or status.cancel_requested:
        return Event.CANCELLED, {"attempt": attempt}
    if attempt is not None:
        return Event.INTERRUPTED, {"attempt": attempt, "cause": cause}
    return Event.REQUEUE_FAILED, {"error": f"job {status.job_id} left the queue without having run ({cause})"}


def is_active(run: RunDir, status: Status) -> bool:
    """Whether more will happen to the run by itself: queued, running, or about to be requeued by its job."""
    if status.state in _UNDER_WAY:
        return True
    return status.state == State.INTERRUPTED and status.probably is None and not is_gone(run, status)


def is_gone(run: RunDir, status: Status) -> bool:
    """Whether the run's newest job has ended, as far as can be told from here. Raises SchedulerError.

    Where it cannot be asked about, as on another cluster, what may still run there has lost the lease.
    """
    if status.job_id is None:
        return True
    if status.scheduler != "slurm":
        return not _has_supervisor(run)
    if not is_here(status):
        return True
    job = slurm.show_job(status.job_id)
    return job is None or job.ended or not job.runs(run.batch_script)


# Submitting


@dataclass(frozen=True)
class Started:
    """A job's id, and for a local one its supervisor's process."""

    job_id: str
    supervisor: subprocess.Popen[bytes] | None = None


def submit(plan: LaunchPlan, *, foreground: bool = False) -> Started:
    """Start a plan: a job in Slurm's queue, or a supervisor on this machine."""
    if plan.scheduler == "slurm":
        from jobkit.submission.sbatch import submit as submit_slurm

        return Started(submit_slurm(plan))
    from jobkit.submission.local import start

    supervisor = start(plan, foreground=foreground)
    return Started(str(supervisor.pid), supervisor)


def settle(run: RunDir) -> Status:
    """`observe`, and record what it found to be the end; the caller holds the submission lock."""
    status = observe(run)
    if status.probably is None:
        return status
    event, fields = _end_of(run.status(), status.probably)
    try:
        run.record(event, **fields)
    except OSError as error:
        log.warning(f"{run.name}: its job is gone ({status.probably}), which cannot be journalled: {error}")
    return run.status()


def reconcile(run: RunDir) -> Status:
    """The status, once the journal agrees with the scheduler; the caller holds the submission lock.

    A submission that was cut off between sbatch and the journal is completed, and a job that has stopped training but
    not yet ended is waited for: it may be about to requeue itself. Raises JobkitError when it does not end.
    """
    status = settle(run)
    if status.submitting:  # by nobody who lives: the lock is held here
        _complete_submission(run, status)
        status = settle(run)
    for pause in _growing(ENDING_SECONDS):
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


def _growing(seconds: float) -> Iterator[float]:
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
            if not is_here(status):
                raise SchedulerError(f"it was made on {status.slurm_cluster}, which is another Slurm than this one")
            found = slurm.jobs_with(run.batch_script)
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


def wait(run: RunDir, done: Callable[[Status], bool], seconds: float) -> Status:
    """The first status, as the run's files tell it, that is `done`, or the one after so many seconds."""
    deadline = time.monotonic() + seconds
    while not done(status := run.status()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return status


def wait_until_gone(run: RunDir, status: Status, seconds: float) -> bool:
    """Whether the job of a status has ended within so many seconds. Raises SchedulerError."""
    for pause in _growing(seconds):
        if is_gone(run, status):
            return True
        time.sleep(pause)
    return False


def cancel(run: RunDir, *, grace: bool = True, on_wait: Callable[[], None] = lambda: None) -> Status:
    """Stop the run for good, with a checkpoint where it is running; returns its status afterwards.

    Its ranks get CANCEL_SECONDS to save, or without `grace` nothing; then its job is ended, whatever it does. `on_wait`
    is called where they are waited for.
    """
    seconds = CANCEL_SECONDS if grace else 0.0
    with run.submission_lock():
        status = settle(run)
        if status.submitting:
            status = reconcile(run)
        if not is_active(run, status):
            return status
        run.record(Event.CANCEL_REQUESTED, grace=seconds)
    if status.state == State.RUNNING and status.attempt:
        # Not by Slurm's scancel, which leaves them KillWait, 30 s by default: the supervisor signals them.
        request = StopRequest(cause="cancelled", grace=seconds)
        records.write(run.stop_request_file(status.attempt.id), request)
        if status.scheduler != "slurm":
            _signal_supervisor(run)  # a script with jobkit.init does not look for requests
        on_wait()
        wait(run, lambda now: not _runs_on(run, now), seconds + CLEAN_UP_SECONDS)
    with run.submission_lock():
        if status.scheduler == "slurm":
            _end_slurm_job(run, run.status())
        status = settle(run)
        return _cancelled(run, status)


def _runs_on(run: RunDir, status: Status) -> bool:
    if status.scheduler == "slurm":
        return status.state in _UNDER_WAY
    return status.state in _UNDER_WAY and _has_supervisor(run)


def _cancelled(run: RunDir, status: Status) -> Status:
    """The status of a run that was asked to stop, journalled as cancelled where it has stopped."""
    if status.state == State.INTERRUPTED:
        run.record(Event.CANCELLED)  # it had stopped already when the cancel came
    return run.status()


def _end_slurm_job(run: RunDir, status: Status) -> None:
    if status.job_id is None or not is_here(status):
        # On another cluster: its job finds it so when it starts, and ends. One that runs has had its time by now, and
        # once the run is continued what is left of it has no lease.
        if status.state in _UNDER_WAY:
            event, fields = _end_of(status, "cancelled")
            run.record(event, **fields)
        return
    if status.state == State.CANCELLED and wait_until_gone(run, status, CLEAN_UP_SECONDS):  # its teardown may run
        return
    slurm.cancel(status.job_id)
    if status.state != State.CANCELLED:
        wait_until_gone(run, status, STOP_SECONDS)  # what has become of it is not journalled yet


def preempt(run: RunDir, *, grace: bool = True) -> Status:
    """Rehearse a preemption: the attempt that runs is stopped, and the run continues by itself as after a real one.

    Without `grace` its ranks are killed on the spot. Returns the status when that attempt has ended, or after
    STOP_SECONDS. Raises JobkitError for a run that is not running.
    """
    status = observe(run)
    attempt = status.attempt
    if status.state != State.RUNNING or attempt is None:
        raise JobkitError(f"{run.name} is {status.state}, not running: there is nothing to preempt")
    # Its supervisor finds the request.
    records.write(run.stop_request_file(attempt.id), StopRequest(cause="preempted", grace=None if grace else 0.0))
    return wait(run, lambda now: now.attempts[attempt.id - 1].ended is not None, STOP_SECONDS)


def _signal_supervisor(run: RunDir) -> None:
    lease = run.lease()
    if lease is None or lease.pid is None or lease.host != os.uname().nodename:
        where = lease.host if lease is not None else "another machine"
        raise JobkitError(f"{run.name} runs on {where}; cancel it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(lease.pid, signal.SIGTERM)
