"""Cancelling runs: one, or many with few questions to Slurm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run.disk_errors import as_told
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission import chains
from jobkit.submission.job import (
    CANCEL_SECONDS,
    CLEAN_UP_SECONDS,
    POLL_SECONDS,
    end_slurm_job,
    growing,
    if_slurm_answers,
    job_of,
    reconcile,
    settle,
    tell_ranks,
)
from jobkit.submission.observer import FindJob, ask, can_be_asked, has_supervisor, is_active, is_gone, is_here, jobs_now

Outcome = Status | JobkitError | None
"""What became of a cancel, as `cancel` returns or raises it."""


def cancel(run: RunDir, *, grace: bool = True, on_wait: Callable[[], None] = lambda: None) -> Status | None:
    """Stop the run for good, with a checkpoint where it is running; its status afterwards, None where it had ended.

    That has no `cancel_requested` where somebody else has continued the run since.

    Its ranks get CANCEL_SECONDS to save, or without `grace` nothing; then its job is ended, whatever it does. `on_wait`
    is called where they are waited for. Runs that come after it and wait on Slurm are cancelled, too.
    """
    asked = _ask(run, grace, ask)
    if asked is None:
        _tell_the_rest(run)
        return None
    if asked.is_waited_for:
        _wait(asked, on_wait)
    return _ended(asked, ask)


def cancel_all(
    runs: Sequence[RunDir], *, grace: bool = True, on_wait: Callable[[RunDir], None] = lambda run: None
) -> Iterator[tuple[RunDir, Outcome]]:
    """`cancel` of many runs, each with what came of it, as it becomes known.

    All are told before one is waited for. Jobs in the queue are ended by one command, and Slurm is asked about all at
    once.
    """
    asked: list[_Asked] = []
    find_job = _jobs_of(runs, ("PENDING", "RUNNING"))
    for run in runs:
        try:
            one = _ask(run, grace, find_job)
        except (JobkitError, OSError) as error:
            yield run, as_told(error)
        else:
            if one is None:
                _tell_the_rest(run)
                yield run, None
            else:
                asked.append(one)
    with contextlib.suppress(SchedulerError):  # what each one's own command says of it comes later
        slurm.cancel_queued([job_id for one in asked if (job_id := one.queued_job(find_job)) is not None])
    find_job = _jobs_of([one.run for one in asked], ("CANCELLED",))
    for one in sorted(asked, key=lambda one: one.is_waited_for):
        try:
            if one.is_waited_for:
                _wait(one, lambda run=one.run: on_wait(run))  # type: ignore[misc]
            yield one.run, _ended(one, ask if one.is_waited_for else find_job)
        except (JobkitError, OSError) as error:
            yield one.run, as_told(error)


def _jobs_of(runs: Sequence[RunDir], enough: Collection[str]) -> FindJob:
    """What finds the jobs of runs; where Slurm does not answer it is asked once, and not for each."""
    try:
        on_slurm = [run for run in runs if run.status().scheduler == "slurm"] if slurm.available() else []
        return jobs_now(on_slurm, enough)
    except SchedulerError as error:
        away = error

        def find(job_id: str) -> slurm.JobInfo | None:
            raise away

        return find


@dataclass(frozen=True)
class _Asked:
    """A run whose cancel is journalled."""

    run: RunDir
    status: Status
    seconds: float
    """What its ranks get to save."""
    elsewhere: str | None
    """The machine they are on, where it is none that can be told from here."""

    @property
    def is_waited_for(self) -> bool:
        # The supervisor of a local run that is only queued is about to begin, and finds the cancel in the journal then.
        return self.status.state == State.RUNNING or self.status.scheduler != "slurm"

    def queued_job(self, find_job: FindJob) -> str | None:
        """The id of its job, where that waits in the queue of the Slurm here. Raises SchedulerError."""
        if self.is_waited_for:
            return None
        job = job_of(self.status, find_job)
        return job.job_id if job is not None and job.state == "PENDING" and job.runs(self.run.batch_script) else None


def _ask(run: RunDir, grace: bool, find_job: FindJob) -> _Asked | None:
    """Journal the cancel, and tell the ranks; None for a run that has ended."""
    seconds = CANCEL_SECONDS if grace else 0.0
    with run.submission_lock():
        status = if_slurm_answers(lambda run: _settle_where_it_was_submitted(run, find_job), run)
        if status.submitting:
            status = reconcile(run)
        if not is_active(run, status):
            return None
        run.record(Event.CANCEL_REQUESTED, grace=seconds)
        status = run.status()  # again: an attempt that has begun since has not heard of it
        elsewhere = None
        if status.state == State.RUNNING and status.attempt:  # under the lock: a submission would tell them, too
            elsewhere = tell_ranks(run, status, status.attempt, seconds)
    return _Asked(run, status, seconds, elsewhere)


def _settle_where_it_was_submitted(run: RunDir, find_job: FindJob) -> Status:
    """`settle`; JobkitError for a run whose directory was moved since: its job looks for it elsewhere."""
    status = settle(run, find_job)
    job = job_of(status, find_job) if status.scheduler == "slurm" and status.state.is_under_way else None
    if job is not None and is_here(status) and job.was_moved_to(run.batch_script):
        submitted = Path(job.script).parents[2]
        raise JobkitError(f"job {job.job_id} was submitted as {submitted}; move it back, or scancel {job.job_id}")
    return status


def _wait(asked: _Asked, on_wait: Callable[[], None]) -> None:
    """Wait for the ranks to save and end; JobkitError where they cannot be told."""
    if asked.status.state == State.RUNNING:  # one that waits for its turn has nothing to save
        on_wait()
    _wait_for_end(asked.run, asked.seconds + CLEAN_UP_SECONDS)
    if asked.elsewhere and _runs_on(asked.run, asked.run.status()):
        raise JobkitError(f"{asked.run.name} runs on {asked.elsewhere}; cancel it there")


def _ended(asked: _Asked, find_job: FindJob) -> Status:
    """As `_end`; what waits for a run that was cancelled is told."""
    status = _end(asked, find_job)
    if status.state == State.CANCELLED:
        chains.cancel_dependents(asked.run, cancel_all)
    return status


def _tell_the_rest(run: RunDir) -> None:
    """Finish what a cancel that was cut off has left: it may have told some of those that wait for the run."""
    if run.status().state == State.CANCELLED:
        chains.cancel_dependents(run, cancel_all)


def _end(asked: _Asked, find_job: FindJob) -> Status:
    """End the job, whatever it does, and record what became of the run."""
    run = asked.run
    with run.submission_lock():
        now = run.status()
        if not now.cancel_requested:  # it has stopped, and somebody else has continued it since: with another job
            return now
        status = asked.status
        try:
            if status.scheduler == "slurm":
                end_slurm_job(run, now, find_job)
            status = settle(run, find_job)
        except SchedulerError as error:
            if run.status().state != State.CANCELLED:
                raise
            log.warning("%s; the run has ended, its job ends by itself", error)
        if status.state == State.INTERRUPTED:
            run.record(Event.CANCELLED)  # it had stopped already when the cancel came
        return run.status()


def _wait_for_end(run: RunDir, seconds: float) -> None:
    """Return when a cancelled run has stopped, when its job is gone, which may not have said so, or in the end."""
    for pause in growing(seconds):
        ask_at = time.monotonic() + pause
        while (waits := _runs_on(run, status := run.status()) and status.cancel_requested) and (
            time.monotonic() < ask_at
        ):
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(SchedulerError):
            if not waits or (can_be_asked(status) and is_gone(run, status)):
                return


def _runs_on(run: RunDir, status: Status) -> bool:
    if status.scheduler == "slurm":
        return status.state.is_under_way
    return status.state.is_under_way and has_supervisor(run, status)
