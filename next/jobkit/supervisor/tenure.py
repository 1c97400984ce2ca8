"""The right to write to a run: the job that asks for it, the lease that gives it, and the reasons to refuse it.

    Me (job, token) --take_lease()--> Tenure (journal, config) --> begin(), close()

Only supervisor/attempt.py gives a Tenure out, under the run's begin lock.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError, LostLease, SchedulerError
from jobkit.run import records
from jobkit.run.journal import Journal
from jobkit.run.records import Lease, Refused, Request
from jobkit.run.rundir import RunDir
from jobkit.run.schema import Config
from jobkit.run.status import Attempt, Status
from jobkit.supervisor.retry import Decision, Room

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job, StopCause

EXIT_RUN_FAILED = 3
"""Exit code of a supervisor whose run has failed: job.sh ends with 1, and starts no other supervisor."""

_EXITS = {"finished": EXIT_FINISHED, "failed": EXIT_RUN_FAILED}


class NotRunnable(JobkitError):
    """This job begins nothing: another one runs the run, or it is over. `exit_code` is the supervisor's."""

    def __init__(self, words: str, exit_code: int = EXIT_RESUMABLE) -> None:
        super().__init__(words)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Me:
    """The job for which a supervisor, or an agent that rescues, acts."""

    job_id: str
    token: str
    """From the job's comment on Slurm, from JOBKIT_TOKEN on this machine."""
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    node: str | None = None
    """Slurm's name of the node with the batch script."""
    job: Job | None = None
    """Slurm's record of the job, as fresh as possible; None for silence, and on this machine."""

    def word(self) -> StopCause | None:
        """Return Slurm's reason to stop the job, by its record."""
        from jobkit.slurm import jobs

        return None if self.job is None else jobs.stop_cause(self.job, controller_time(), restarts=self.restart)

    def is_requeued(self) -> bool:
        """Return whether Slurm has put the job back into the queue: this start of it has nothing more to do."""
        return self.job is not None and self.job.is_requeued(controller_time(), self.restart)

    def room(self) -> Room:
        """Return the room of a job that Slurm is ending."""
        return Room(requeue="requeue" if self.job is None or self.job.requeueable else "successor")


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """The right to write: this process holds the lease until another one takes the run over."""

    run: RunDir
    config: Config
    me: Me
    journal: Journal
    adopted: Attempt | None = None
    """An open attempt of this same start of the job, whose agents may live: a supervisor before this one began it."""
    decision: Decision | None = None
    """What a supervisor before this one decided after the last attempt (requeue, successor), and may not have carried
    out: look, do it, and leave. Nothing is to be begun then."""

    @property
    def writer(self) -> str:
        """The word of the lease, for Contact.writer."""
        return str(self.journal.writer)


def refuse(status: Status, me: Me, decision: Decision | None) -> None:
    """Raise NotRunnable if this job has nothing to run: Slurm is not asked, whose silence would be no answer."""
    if status.token != me.token and (decision is None or decision.action != "successor"):
        raise NotRunnable(f"{status.name}: job {me.job_id} begins nothing: the run was submitted again since")
    if status.state in ("finished", "cancelled"):
        raise over(status)
    if status.attempt is not None and status.attempt.began.token == me.token and status.is_over:
        raise over(status)  # an earlier supervisor of this job decided so


def over(status: Status) -> NotRunnable:
    words = f": {status.reason}" if status.reason else ""
    return NotRunnable(f"{status.name} is {status.state}{words}", _EXITS.get(status.state, EXIT_RESUMABLE))


def config_of(run: RunDir, me: Me) -> Config:
    """Return the run's config. Raises NotRunnable where another user wrote it, or a variable is not set in the job."""
    try:
        run.refuse_foreign()
        return run.config()
    except InputError as error:
        Journal(run).append(Refused(token=me.token, error=str(error)))
        raise NotRunnable(str(error), EXIT_RUN_FAILED) from error


def belongs_to(attempt: Attempt, me: Me) -> bool:
    """Return whether an attempt belongs to this start of this job."""
    began = attempt.began
    return (began.token, began.job_id, began.restart) == (me.token, me.job_id, me.restart)


def take_lease(run: RunDir, me: Me, config: Config, attempt: int) -> Tenure:
    """Become the one writer. `attempt` is the attempt whose ranks may go on to publish; 0 for none."""
    writer = secrets.token_hex(8)
    write_lease(run, me, writer, attempt)
    return Tenure(run=run, config=config, me=me, journal=Journal(run, writer))


def write_lease(run: RunDir, me: Me, writer: str, attempt: int) -> None:
    lease = Lease(
        attempt=attempt,
        writer=writer,
        token=me.token,
        job_id=me.job_id,
        restart=me.restart,
        node=me.node,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    records.write(run.lease_file, lease)


def check_lease(tenure: Tenure) -> None:
    lease = tenure.run.lease()
    if lease is None or lease.writer != tenure.writer:
        raise LostLease(f"{tenure.run.name}: another process has taken the run over")


def request_of(run: RunDir, token: str, attempt: int) -> Request | None:
    """Return what a person asks of an attempt: rather a cancel than a stop or a preemption.

    A cancel is about the submission: one that names the attempt before this one came between the two.
    """
    for kind in ("cancel", "stop", "preempt"):
        request = run.request(kind)
        if request is not None and request.token == token and (kind == "cancel" or request.attempt == attempt):
            return request
    return None


def controller_time() -> float:
    """Return the time by the controller's clock; by ours if Slurm does not answer."""
    from jobkit.slurm import jobs

    try:
        return jobs.controller_time()
    except SchedulerError:
        return time.time()
