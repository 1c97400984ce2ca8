"""A run seen from outside: what its files say, and whether its job lives. Nothing is written.

A job is asked about where it is, and nowhere else: ids of two clusters collide. What has ended and could record nothing
is told as what is probable (`Status.probably`); only a submission records it (submission/job.py).
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobkit import slurm
from jobkit.run import sweeps
from jobkit.run.dependencies import Verdict, verdict
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status, apply
from jobkit.run.tail import Tail

if TYPE_CHECKING:
    from jobkit.supervisor.line import Line

ASK_SECONDS = 10.0
"""How often one run's job is asked about: all share a slurmctld, which answers one request at a time. The run's own
files say the rest sooner."""

LIST_SECONDS = 2.0
"""How long a list of all runs waits for a controller that does not answer."""


FindJob = Callable[[str], slurm.JobInfo | None]
"""What says what Slurm knows of the job of an id; raises SchedulerError."""


def ask(job_id: str) -> slurm.JobInfo | None:
    """What Slurm says of a job now; raises SchedulerError."""
    return slurm.show_job(job_id)


def observe(run: RunDir, find_job: FindJob = ask) -> Status:
    """The run's status as it is now, its job's state included; nothing is written. Raises SchedulerError."""
    return _looked_at(run, run.status(), find_job)


def jobs_now(runs: Sequence[RunDir], enough: Collection[str]) -> FindJob:
    """What finds the jobs of runs in one answer of Slurm's; one in no state of `enough` is asked about by itself: of an
    end a list does not say all that tells why. Raises SchedulerError."""
    listed = _by_id(slurm.jobs_of(_owners(runs))) if runs else {}

    def find(job_id: str) -> slurm.JobInfo | None:
        job = listed.get(job_id)
        return job if job is None or job.state in enough else slurm.show_job(job_id)

    return find


def _by_id(jobs: Iterable[slurm.JobInfo]) -> dict[str, slurm.JobInfo]:
    """Jobs by their ids; of a job array some task by the array's."""
    tasks = {job.job_id: job for job in jobs}
    return {job_id.partition("_")[0]: job for job_id, job in tasks.items()} | tasks


def observe_all(found: Sequence[tuple[RunDir, Status]]) -> list[Status]:
    """As `observe` of many runs whose status was read, with one question to Slurm; raises SchedulerError."""
    on_slurm = [run for run, status in found if status.scheduler == "slurm" and _is_asked_about(status, LIST_SECONDS)]
    listed = slurm.jobs_of(_owners(on_slurm), LIST_SECONDS) if on_slurm else ()
    jobs = _by_id(listed)
    line = line_here() if any(status.waiting or status.waits_in_sweep for _, status in found) else None
    return [_looked_at(run, status, jobs.get, LIST_SECONDS, line) for run, status in found]


def _looked_at(
    run: RunDir,
    status: Status,
    find_job: FindJob,
    timeout: float = slurm.ANSWER_SECONDS,
    line: Line | None = None,
) -> Status:
    """A run's status with what has become of its job; `find_job` says what Slurm knows of one, and `line` who waits on
    this machine, where that was looked at before."""
    if status.submitting:
        return _with_cut_off_submission(run, status)
    if may_be_requeued(status):
        return _with_requeued_job(run, status, find_job)
    if not _is_asked_about(status, timeout):
        return status
    if status.scheduler != "slurm":
        return _with_turn(run, status, line) if has_supervisor(run, status) else _with_end(run, status, None)
    job_id = str(status.job_id)
    job, waited = find_job(job_id), status.state == State.QUEUED and not status.cancel_requested
    return _with_job(run, status, job, was_cancelled=job is None and waited and slurm.left_its_array(job_id, find_job))


def line_here() -> Line:
    """Who waits on this machine."""
    from jobkit.supervisor.line import Line  # here: a run on Slurm has no use for this machine's queue

    return Line()


def _with_turn(run: RunDir, status: Status, line: Line | None) -> Status:
    """The status of a local run, with its place in the line where it waits for its turn."""
    if status.state == State.QUEUED and (status.waiting or status.waits_in_sweep):
        found = (line or line_here()).find(run.path, _owner_of_run(run))
        before = runs_before_now(run, status.after).text
        turn = status.waiting or f"its turn in sweep {status.sweep}"
        status.waits_for = before or (turn if found is None else f"{found.text}, {found.ordinal} in line")
    return status


def runs_before_now(run: RunDir, after: Sequence[str]) -> Verdict:
    """As `verdict`; a local run whose process is gone, which its journal cannot say, is not called running."""
    found = verdict(run, after)
    seen = [(one, status if status.scheduler == "slurm" else observe(one)) for one, status in found.unfinished]
    return replace(found, unfinished=tuple(seen))


def may_be_requeued(status: Status) -> bool:
    """Whether the run has stopped in a Slurm job that may be about to go back into the queue."""
    return status.state == State.INTERRUPTED and status.scheduler == "slurm" and status.job_id is not None


def _with_requeued_job(run: RunDir, status: Status, find_job: FindJob) -> Status:
    """The status of an interrupted run: queued where Slurm has put its job back, which nobody in it could record."""
    if not can_be_asked(status):
        return status
    job = find_job(str(status.job_id))
    if job is None or not job.runs(run.batch_script):
        return status
    if job.state == "PENDING" or job.requeued_by_slurm:
        status.next_began = "requeued"
        return _in_the_queue(status, job)
    return status


def _with_cut_off_submission(run: RunDir, status: Status) -> Status:
    """The status of a run that is being submitted, or that nobody submits any more: its command was killed."""
    # A script with jobkit.init submits its run itself, without the lock of submissions.
    if _is_submitted_by_somebody(run, status) or (status.scheduler != "slurm" and has_supervisor(run, status)):
        return status
    now = run.status()  # again: it may have become whole since
    if not now.submitting or now.start != status.start:
        return now
    apply(now, {"time": time.time(), "event": Event.SUBMIT_FAILED})
    now.probably, now.error = "lost", "its submission was cut off; the same command completes it"
    return now


def _is_submitted_by_somebody(run: RunDir, status: Status) -> bool:
    """Whether its submission may go on: of a sweep's runs one lock is held for all."""
    of_sweep = sweeps.is_being_submitted(run.path.parent) if status.sweep else False
    return run.is_being_submitted() is not False or of_sweep is not False


def _owners(runs: Sequence[RunDir]) -> set[str]:
    """Who the runs belong to, and so their jobs, as Slurm's commands take it."""
    uids = {_owner(run) for run in runs}
    names = set()
    for uid in uids:
        try:
            names.add(pwd.getpwuid(uid).pw_name)
        except KeyError:  # a user that this machine does not know
            names.add(str(uid))
    return names


def _owner(run: RunDir) -> int:
    """Who has submitted the run last, and so has its job."""
    try:
        return run.batch_script.stat().st_uid
    except OSError:
        pass
    return _owner_of_run(run)


def _owner_of_run(run: RunDir) -> int:
    try:
        return run.path.stat().st_uid
    except FileNotFoundError:  # removed since it was listed
        return os.getuid()


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
            self._seen = _looked_at(self.run, status, slurm.show_job)
            self.is_over = not is_active(self.run, self._seen)
            return self._seen
        if self._seen is not None and status.state == State.QUEUED and self._seen.job_id == status.job_id:
            status.waits_for = self._seen.waits_for
            status.state = State.HELD if self._seen.state == State.HELD else State.QUEUED
        return status


def _is_asked_about(status: Status, timeout: float = slurm.ANSWER_SECONDS) -> bool:
    """Whether the job of a run that is under way can be asked about from here. Raises SchedulerError."""
    if status.submitting or not status.state.is_under_way or status.job_id is None:
        return False  # without a job's id there is none: its submission was killed before it began
    return status.scheduler != "slurm" or can_be_asked(status, timeout)


def can_be_asked(status: Status, timeout: float = slurm.ANSWER_SECONDS) -> bool:
    """Whether the Slurm here may know the run's job: of one that an earlier jobkit submitted only its script tells."""
    return (status.slurm_cluster is None and slurm.available()) or is_here(status, timeout)


def is_here(status: Status, timeout: float = slurm.ANSWER_SECONDS) -> bool:
    """Whether the Slurm that commands here talk to is the one that has the run's job: ids of two clusters collide."""
    return slurm.available() and status.slurm_cluster == slurm.cluster(timeout)


def has_supervisor(run: RunDir, status: Status) -> bool:
    """Whether a local run's supervisor lives, or before its turn the process that waits for its sweep; where their
    locks may not be looked at, what the journal says holds."""
    if run.has_local_supervisor() is not False:
        return True
    return status.waits_in_sweep and sweeps.has_runner(run.path.parent, status.sweep) is not False


def _with_job(run: RunDir, status: Status, job: slurm.JobInfo | None, *, was_cancelled: bool = False) -> Status:
    """The status of a run whose job Slurm has told about; `was_cancelled` says so of one that it does not know."""
    if job is not None and status.slurm_cluster is not None and job.is_anothers(run.batch_script):
        job = None
    is_ours = job is not None and job.runs(run.batch_script)
    if not is_ours and (job is not None or status.slurm_cluster is None):
        return status  # ours is gone, or on another cluster: nothing is certain
    if job is None and _owner(run) != os.getuid() and os.getuid() != 0:
        return status  # Slurm may not show it to other users (PrivateData=jobs)
    if job is None or job.ended:
        return _with_end(run, status, job, "cancelled" if was_cancelled else "lost")
    if job.state == "PENDING":
        return _in_the_queue(status, job)  # Slurm itself may have put it back
    return status


def _in_the_queue(status: Status, job: slurm.JobInfo) -> Status:
    status.waits_for = None if job.reason in ("", "None") else job.reason
    status.state = State.HELD if job.held else State.QUEUED
    return status


def _with_end(run: RunDir, asked: Status, job: slurm.JobInfo | None, unknown: str = "lost") -> Status:
    """The status of a run whose job has ended, which nobody in it could record; `asked` is the one with that job.

    `unknown` is the cause where Slurm gives none.
    """
    status = run.status()  # again: its end may have been recorded while the scheduler was asked
    # Or the next job may have begun: the end of the one that was asked about says nothing of that.
    if status.submitting or not status.state.is_under_way or status.start != asked.start:
        return status
    # Slurm forgets a job MinJobAge, 300 s by default, after its end: then it is lost, and nobody can say why.
    cause = (slurm.stop_cause(job) if job else None) or unknown
    if job is not None and job.state == "FAILED" and status.state != State.RUNNING:
        cause = "crashed"  # its batch script, before any rank: as a `setup` line that fails
    event, fields = end_of(run, status, cause)
    apply(status, {"time": time.time(), "event": event, **fields})
    status.probably = cause
    return status


def end_of(run: RunDir, status: Status, cause: str) -> tuple[Event, dict[str, Any]]:
    """The event that says how a run under way ended whose job is gone."""
    attempt = status.attempt.id if status.attempt and status.state == State.RUNNING else None
    if cause == "cancelled" or status.cancel_requested:
        return Event.CANCELLED, {"attempt": attempt}
    if attempt is not None:
        return Event.INTERRUPTED, {"attempt": attempt, "cause": cause}
    if cause == "crashed":
        log = run.job_log(str(status.job_id))
        said = Tail().read(log).strip().splitlines()[-2:]
        return Event.REQUEUE_FAILED, {"error": f"job {status.job_id} could not begin: {' / '.join(said)} ({log})"}
    return Event.REQUEUE_FAILED, {"error": f"job {status.job_id} left the queue without having run ({cause})"}


def is_active(run: RunDir, status: Status) -> bool:
    """Whether more will happen to the run by itself: queued, running, or about to be requeued by its job."""
    if status.state.is_under_way:
        return not status.never_submitted
    return status.state == State.INTERRUPTED and status.probably is None and not is_gone(run, status)


def is_gone(run: RunDir, status: Status) -> bool:
    """Whether the run's newest job has ended, as far as can be told from here. Raises SchedulerError.

    Where it cannot be asked about, as on another cluster, what may still run there has lost the lease.
    """
    if status.job_id is None:
        return True
    if status.scheduler != "slurm":
        return not has_supervisor(run, status)
    if not can_be_asked(status):
        return True
    job = slurm.show_job(status.job_id)
    return job is None or job.ended or not job.runs(run.batch_script)
