"""A run's wait before its first attempt: for runs that it comes after, and on this machine for its turn.

A local run waits in its own supervisor, which is light and not bound to the terminal that it was typed in. A job of
Slurm's does not wait with its nodes: it goes back into the queue.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobkit import slurm
from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.dependencies import Verdict, verdict
from jobkit.run.events import Event
from jobkit.run.references import NoSuchResult, keep_values, with_values
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.supervisor.dependents import depend, dependency_of, start_now
from jobkit.supervisor.device_leases import Leases
from jobkit.supervisor.local_job import LocalJob
from jobkit.supervisor.queue import LOOK_SECONDS, Place
from jobkit.supervisor.slurm_job import SlurmJob

T = TypeVar("T")

JOURNAL_SECONDS = 5.0
"""How long a job that has just started waits for what another node has written of the run before it."""


def wait_for_runs(run: RunDir, job: LocalJob) -> bool:
    """Wait until those runs are finished that this one comes after; False where it is not to start, which is
    journalled."""
    after = _after(run)

    def look() -> Verdict | None:
        found = verdict(run, after)
        return None if found.unfinished and not found.ends else found

    found = _wait(run, job, look, lambda: ", ".join(after)) if after else None
    return not after or (found is not None and _may_start(run, found))


def is_after_others(run: RunDir) -> bool:
    """Whether there are runs that it has to wait for."""
    return bool(verdict(run, _after(run)).unfinished)


def _after(run: RunDir) -> list[str]:
    """The runs that decide whether it may start; none once it has started since a person submitted it."""
    return [] if run.status().has_begun else run.config().after


def wait_in_line(run: RunDir, job: LocalJob, place: Place) -> Leases | None:
    """What the run needs of this machine, as soon as it is its turn; None where it is not to start, which is
    journalled."""
    with place:
        return _wait(run, job, place.take, lambda: place.need.text)


def _wait(run: RunDir, job: LocalJob, look: Callable[[], T | None], what: Callable[[], str]) -> T | None:
    """What `look` finds, as soon as it does; None where the run was cancelled, told to stop or removed meanwhile."""
    is_told, problem, journal_bytes = False, "", -1
    while True:
        if job.stops_waiting():
            run.record(Event.INTERRUPTED, cause="user")
            return None
        if (now := _journal_bytes(run)) != journal_bytes:
            if now is None:
                log.warning("%s is gone: it waits no more", run.path)
                return None
            journal_bytes = now
            if run.status().cancel_requested:
                run.record(Event.CANCELLED)
                return None
        try:
            if (found := look()) is not None:
                return found
        except OSError as error:  # a full disk, or a folder that somebody has removed: it may be back
            if str(error) != problem:
                problem = str(error)
                log.warning("%s cannot look whether it may start: %s", run.name, problem)
        if not is_told:
            run.record(Event.WAITING, **{"for": what(), "host": socket.gethostname()})
            is_told = True
        time.sleep(LOOK_SECONDS)


def _journal_bytes(run: RunDir) -> int | None:
    """The length of the journal, which grows when somebody cancels the run; None where it is gone."""
    try:
        return run.journal.path.stat().st_size
    except OSError:
        return None


def may_start_in_job(run: RunDir, job: SlurmJob) -> bool:
    """Whether this start of a Slurm job may begin an attempt; else what follows is done: the job is in the queue
    again, held, or has nothing to do any more. Raises SchedulerError where Slurm takes it back in no way."""
    if not _after(run):
        return True
    found = _settled(run)
    if found.unfinished and not found.ends:
        _go_back(run, job, found)
        return False
    return _may_start(run, found)


def _settled(run: RunDir) -> Verdict:
    """The verdict, once what has just ended has been written down: jobs that are gone cannot write any more."""
    after, until = run.config().after, time.monotonic() + JOURNAL_SECONDS
    while True:
        found = verdict(run, after)
        jobs = [_job(status) for _, status in found.unfinished]
        if not found.unfinished or found.ends or all(job is not None and not job.ended for job in jobs):
            return found
        if time.monotonic() > until:
            break
        time.sleep(1.0)
    for (other, status), job in zip(found.unfinished, jobs, strict=True):
        if _was_cancelled(status, job):
            return Verdict(ends=f"it comes after {other.name}, which was cancelled")
    return found


def _job(status: Status) -> slurm.JobInfo | None:
    """The job of a run that is under way here; None where there is none, or Slurm does not say."""
    with contextlib.suppress(SchedulerError):
        if status.state.is_under_way and _is_here(status):
            return slurm.show_job(str(status.job_id))
    return None


def _was_cancelled(status: Status, job: slurm.JobInfo | None) -> bool:
    """Whether the job of a run that is under way, as its files say, was cancelled by Slurm's own scancel."""
    if job is not None:
        return status.state.is_under_way and slurm.stop_cause(job) == "cancelled"
    with contextlib.suppress(SchedulerError):
        return status.state == State.QUEUED and _is_here(status) and slurm.left_its_array(str(status.job_id))
    return False


def _is_here(status: Status) -> bool:
    """Whether the run has a job on this Slurm. Raises SchedulerError."""
    return status.scheduler == "slurm" and status.job_id is not None and status.slurm_cluster == slurm.cluster()


def _go_back(run: RunDir, own: SlurmJob, found: Verdict) -> None:
    """Put this job into the queue again: to follow the jobs of the runs that it waits for, or held where one has none.

    Whoever continues such a run releases it (dependents.py).
    """
    jobs = [_job(status) for _, status in found.unfinished]
    follows = all(job is not None and not job.ended for job in jobs)
    run.record(Event.WAITING, **{"for": ", ".join(run.config().after), "held": not follows, "job_id": own.id})
    run.failed_starts.unlink(missing_ok=True)  # it is no node's fault
    log.info("%s waits for %s: job %s goes back into the queue", run.name, found.text, own.id)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the requeue, which reaches the commands below, too
    try:
        slurm.command("scontrol", "requeue" if follows else "requeuehold", own.id)
    except SchedulerError as error:
        if slurm.is_away(error):
            raise
        # JobRequeue=0: another job does what this one cannot.
        successor = own.submit_again(f"--dependency={dependency_of(found)}" if follows else "--hold")
        run.record(Event.REQUEUED, job_id=successor, cause="resubmitted", predecessor=own.id)
        return
    if follows:  # only now: Slurm takes it for a job in the queue alone
        with contextlib.suppress(SchedulerError):  # without it the job starts after a while, and looks again
            depend([own.id], dependency_of(found))
            start_now([own.id])


def _may_start(run: RunDir, found: Verdict) -> bool:
    """Whether the run is to begin, by the runs before it and what it takes from them; where not, that is journalled."""
    if found.ends:
        log.warning("%s does not start: %s", run.name, found.ends)
        run.record(Event.CANCELLED, error=found.ends)
        return False
    try:
        if not run.status().attempts:
            keep_values(run.config(), run)
        for path in with_values(run.config(), run).inputs:
            if not Path(path).expanduser().exists():
                raise NoSuchResult(f"inputs: {path}: no such file or directory; the task needs it to start")
    except NoSuchResult as error:
        log.warning("%s does not start: %s", run.name, error)
        run.record(Event.FAILED, error=str(error))
        return False
    return True
