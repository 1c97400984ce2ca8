"""How runs are now: what their journals say, and the scheduler's word beside it. Nothing is written here.

    RunDir --read_status--> Status --one squeue for all, or the lock of a local job--> View

Every command that shows runs, and the submission before it decides, calls `view` or `views`. A job is a run's where
its comment holds the run's token: job ids repeat on other clusters, and paths change.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.log import log
from jobkit.run.files import user_name
from jobkit.run.journal import known_status, read_status
from jobkit.run.locks import Lock
from jobkit.run.records import Submitted
from jobkit.run.rundir import RunDir
from jobkit.run.status import UNDER_WAY, State, Status, next_try

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job

QUEUE_SECONDS = 10.0
"""How long a controller may take to answer for all runs; the journals are shown without its word then."""


@dataclass(frozen=True)
class View:
    """A run as it is now.

    now = view(run)
    now.state      # "lost": the journal says running, and Slurm has no such job
    now.words      # "job 17 is gone, and nothing recorded why; the same command continues the run"
    """

    run: RunDir
    status: Status
    job: Job | None
    """Slurm's record of the run's job; None where there is none, or on this machine."""
    answered: bool
    """False where it is not known if the job lives: no answer, another cluster or host, another user's job."""
    alive: bool = False
    """True where the scheduler has the job, the local job's lock is held, or a submission is being made."""

    @property
    def state(self) -> State:
        """The journal's state, or LOST; QUEUED also where Slurm itself has put the job back."""
        if self.status.state not in UNDER_WAY or not self.answered:
            return self.status.state
        if not self.alive:
            return State.LOST
        return State.QUEUED if self.is_pending else self.status.state

    @property
    def is_pending(self) -> bool:
        return self.job is not None and self.job.state == "PENDING"

    @property
    def is_over(self) -> bool:
        """True if nothing more happens to the run by itself."""
        return self.state not in UNDER_WAY

    @property
    def elsewhere(self) -> str:
        """The host that alone knows whether a local run lives; empty where this one knows, and on Slurm."""
        submitted = self.status.submitted
        return submitted.host if submitted is not None and not self.answered and _is_elsewhere(submitted) else ""

    @property
    def standing(self) -> str:
        """The state, with the words where it is not known whether the job lives."""
        return self.state if self.answered else f"{self.state}, {self.words}"

    @property
    def exit_code(self) -> int:
        """Of a command that has waited for the end of the run."""
        match self.state:
            case State.FINISHED:
                return EXIT_FINISHED
            case State.FAILED:
                return EXIT_FAILED
            case State.NEW | State.QUEUED | State.RUNNING | State.INTERRUPTED | State.LOST | State.CANCELLED:
                return EXIT_RESUMABLE

    @property
    def job_id(self) -> str | None:
        return self.job.job_id if self.job is not None else self.status.job_id

    @property
    def words(self) -> str:
        """Why the run is in this state, in a plain line; it may be empty."""
        job = f"job {self.job_id}" if self.job_id else "its job"
        if self.status.state not in UNDER_WAY:
            return self.status.reason
        if self.state == State.LOST:
            end = f"ended ({self.job.state})" if self.job is not None else "is gone"
            if self.run.failed_starts.exists():
                return f"{job} {end} before it could begin an attempt"
            return f"{job} {end}, and nothing recorded why; the same command continues the run"
        if self.job is not None and self.is_pending:
            from jobkit.slurm.pending import explain_reason

            held = f"; to release it: scontrol release {self.job.job_id}" if self.job.held else ""
            return f"{job} waits: {explain_reason(self.job.reason or 'None')}{held}"
        attempt, submitted = self.status.open_attempt, self.status.submitted
        words = f"attempt {attempt.number} in {job}" if attempt is not None else f"{job} is starting"
        words = self.waiting or words
        if self.elsewhere:
            return f"{words} on host {self.elsewhere}, not known from here"
        whose = f"cluster {submitted.cluster}" if submitted is not None and submitted.cluster else "its owner"
        return words if self.answered else f"{words}, as far as the journal knows: {whose} was not heard"

    @property
    def waiting(self) -> str:
        """The next try, its time, and the error of the last one; empty while an attempt runs."""
        last = self.status.attempt if self.status.open_attempt is None and not self.is_over else None
        words = next_try(last.ended) if last is not None else ""
        return f"{words}: {last.ended.reason}" if words and last is not None and last.ended is not None else ""


def view(run: RunDir, *, locked: bool = False) -> View:
    """Return how a run is now. `locked`: the caller holds its submit lock, so that no other submission is under way."""
    return look([(run, read_status(run))], locked=locked)[0]


def known_view(run: RunDir) -> View:
    """Return how a run is that was there before. Raises OSError if its directory is gone, as of a mount."""
    return look([(run, known_status(run))])[0]


def views(runs: Iterable[RunDir]) -> list[View]:
    """Return how runs are now, by one question to Slurm."""
    return look([(run, read_status(run)) for run in runs])


def look(read: Sequence[tuple[RunDir, Status]], *, locked: bool = False) -> list[View]:
    """As `views`, of runs whose journals were read already."""
    under_way = [status.submitted for _, status in read if status.state in UNDER_WAY and status.submitted is not None]
    jobs = _jobs_of([submitted for submitted in under_way if submitted.scheduler == "slurm"])
    return [_view(run, status, jobs, locked) for run, status in read]


_Jobs = dict[tuple[str, "int | None"], "Job | None"]
"""(token, task) -> the job, None where Slurm has none; the key is missing where that is not known."""


def _view(run: RunDir, status: Status, jobs: _Jobs, locked: bool) -> View:
    submitted, job = status.submitted, None
    if status.state not in UNDER_WAY or submitted is None:
        return View(run, status, None, answered=True)
    if submitted.scheduler == "slurm":
        key = (submitted.token, submitted.task)
        answered, job = key in jobs, jobs.get(key)
        alive = job is not None and not job.ended
    else:
        held = _is_held(run.alive_lock())
        answered, alive = held or (held is False and not _is_elsewhere(submitted)), bool(held)
    if not alive and not locked and _is_held(run.submit_lock()):
        alive = True  # its submission is being made
    if answered and not alive and (now := read_status(run)) != status:
        if now.submitted is None:  # its directory went away during the question, as of a mount: that says nothing
            return View(run, status, None, answered=False)
        return View(run, now, None, answered=now.state not in UNDER_WAY)  # it went on during the question
    return View(run, status, job, answered, alive)


def _is_elsewhere(submitted: Submitted) -> bool:
    """Return whether a local run is another host's: some file systems keep locks to a host, so that one that is free
    here says nothing about it."""
    return submitted.scheduler == "local" and submitted.host not in ("", socket.gethostname())


def _is_held(lock: Lock) -> bool | None:
    try:
        return lock.is_held()
    except PermissionError:  # another user's
        return None


def _jobs_of(submissions: Sequence[Submitted]) -> _Jobs:
    from jobkit.slurm import commands, jobs

    if not submissions or not commands.is_available():
        return {}
    users = ",".join(sorted({item.user or user_name() for item in submissions}))
    try:
        index = jobs.by_token(jobs.queue(users, timeout=QUEUE_SECONDS))
        # A job that is found says for all runs of its cluster that this is it, wherever its controller has moved to.
        with_jobs = {item.cluster for item in submissions if (item.token, item.task) in index}
        clusters = {item.cluster for item in submissions}
        askable = {name for name in clusters if name is None or name in with_jobs or commands.is_here(name)}
    except SchedulerError as error:
        log.warning("%s; what follows is what the run directories say", error)
        return {}
    answer: _Jobs = {}
    for item in (item for item in submissions if item.cluster in askable):
        candidates = index.get((item.token, item.task), [])
        # Slurm may hide the jobs of other users (PrivateData=jobs): of theirs, no job is no answer.
        if candidates or os.geteuid() == 0 or item.user in ("", user_name()):
            best = max(candidates, key=lambda job: (not job.ended, job.state != "PENDING"), default=None)
            answer[item.token, item.task] = best
    return answer
