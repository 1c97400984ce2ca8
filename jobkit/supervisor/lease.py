"""The job for which a process acts (ThisJob), and its right to write (HeldLease), which attempt.py gives.

Supervisor, agent and worker/foreign_attempt.py act by it.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jobkit.config.schema import Config
from jobkit.errors import EXIT_RESUMABLE, JobkitError, LostLease, SchedulerError
from jobkit.run import records
from jobkit.run.journal import Journal
from jobkit.run.records import Lease
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt
from jobkit.supervisor.retry import Decision

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job, StopCause


class NotRunnable(JobkitError):
    """This job begins nothing: another one runs the run, or it is over. `exit_code` is the supervisor's."""

    def __init__(self, words: str, exit_code: int = EXIT_RESUMABLE) -> None:
        super().__init__(words)
        self.exit_code = exit_code


def way_back(job: Job | None) -> Literal["requeue", "successor"]:
    """Return how the run of a job gets into the queue again."""
    return "successor" if job is not None and not job.requeueable else "requeue"


@dataclass(frozen=True, kw_only=True)
class ThisJob:
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

    def slurm_cause(self) -> StopCause | None:
        """Return Slurm's reason to stop the job, by its record."""
        from jobkit.slurm import jobs

        return None if self.job is None else jobs.stop_cause(self.job, _controller_time(), restarts=self.restart)

    def is_requeued(self) -> bool:
        """Return whether Slurm has put the job back into the queue: this start of it has nothing more to do."""
        return self.job is not None and self.job.is_requeued(_controller_time(), self.restart)

    def began(self, attempt: Attempt) -> bool:
        """Return whether an attempt belongs to this start of this job."""
        began = attempt.began
        return (began.token, began.job_id, began.restart) == (self.token, self.job_id, self.restart)


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """The right to write: this process holds the lease until another one takes the run over."""

    run: RunDir
    config: Config
    this_job: ThisJob
    journal: Journal
    adopted: Attempt | None = None
    """An open attempt of this same start of the job, whose agents may live: a supervisor before this one began it."""
    decision: Decision | None = None
    """The decision of a supervisor before this one after the last attempt (requeue, successor), which it may not have
    carried out: look, do it, and leave. Nothing is to be begun then."""

    @property
    def writer(self) -> str:
        """The word of the lease, for Contact.writer."""
        return str(self.journal.writer)

    def write_lease(self, attempt: int) -> None:
        """Become, or stay, the one writer; ranks of `attempt` may publish, and of no other (0: of none)."""
        lease = Lease(
            attempt=attempt,
            writer=self.writer,
            token=self.this_job.token,
            job_id=self.this_job.job_id,
            restart=self.this_job.restart,
            node=self.this_job.node,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        records.write(self.run.lease_file, lease)

    def check_lease(self) -> None:
        """Raise LostLease if another process has the run now."""
        lease = self.run.lease()
        if lease is None or lease.writer != self.writer:
            raise LostLease(f"{self.run.name}: another process has taken the run over")


def _controller_time() -> float:
    """Return the time by the controller's clock; by ours if Slurm does not answer."""
    from jobkit.slurm import jobs

    try:
        return jobs.controller_time()
    except SchedulerError:
        return time.time()
