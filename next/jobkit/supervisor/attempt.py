"""The life of an attempt in the journal: who may begin it, why it ended, what is next.

    take_over() --Tenure--> begin() --Began--> (the ranks live) --> close() --Ended, Finished ...--> Decision
                              ^------------------ in place ------------------------------------------'

The supervisor calls these; a rescuing agent calls `rescue`, which is `close` after its supervisor is gone. Each holds
the run's begin lock, and the journal takes events from the holder of the lease alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jobkit.errors import EXIT_RESUMABLE, JobkitError
from jobkit.run.journal import Journal
from jobkit.run.rundir import RunDir
from jobkit.run.schema import Config
from jobkit.run.status import Attempt
from jobkit.supervisor.diagnosis import Facts, LostNode
from jobkit.supervisor.retry import Decision, Room

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job

__all__ = [
    "Decision",
    "Facts",
    "LostNode",
    "Me",
    "NotRunnable",
    "Room",
    "Tenure",
    "begin",
    "close",
    "rescue",
    "take_over",
]

EXIT_RUN_FAILED = 3
"""Exit code of a supervisor whose run has failed: job.sh ends with 1, and starts no other supervisor."""


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
        return self.journal.writer or ""


def take_over(run: RunDir, me: Me) -> Tenure:
    """Return the right to write for this job. Raises NotRunnable where the job has nothing to run (any more)."""
    raise NotImplementedError


def begin(tenure: Tenure, nodes: list[str], ranks: int, how: Literal["start", "in place", "requeue"] = "start") -> int:
    """Journal a new attempt and return its number. Raises NotRunnable (cancelled meanwhile), LostLease, OSError."""
    raise NotImplementedError


def close(tenure: Tenure, facts: Facts, room: Room) -> Decision:
    """Journal why the open attempt ended, and return what is next. Harmless to call twice. Raises LostLease.

    A full disk does not raise: the events wait in `tenure.journal`, and `flush` is to be tried again.
    """
    raise NotImplementedError


def rescue(run: RunDir, me: Me, writer: str, facts: Facts, room: Room) -> Decision | None:
    """Close the attempt of a supervisor that is gone; None where somebody else has acted, or nothing is to be done.

    `writer` is the word of the supervisor that the agent has known last (Contact.writer): a lease with another word is
    of a supervisor that lives, or of another agent that was first. The caller carries the decision out.
    """
    raise NotImplementedError
