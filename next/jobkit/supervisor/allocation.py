"""What the supervisor's loop needs of its job: nodes, agents on them, the scheduler's word, a way back to the queue.

loop.py --> Allocation <-- SlurmAllocation (a Slurm job), LocalAllocation (this machine)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jobkit.supervisor.retry import Decision, Room

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job, StopCause
    from jobkit.supervisor.attempt import Tenure
    from jobkit.supervisor.placement import Placement

MARGIN_SECONDS = 90.0
"""How long before the time limit ranks are told to stop: a fifth of the limit, but at most this."""


def margin_of(limit: float) -> float:
    """Return how many seconds before the end of a time limit of `limit` seconds the ranks are told to stop."""
    return min(MARGIN_SECONDS, 0.2 * limit)


@dataclass(frozen=True, kw_only=True)
class Look:
    """The scheduler's answer to one question; on this machine there is none to ask, and everything is well."""

    asked: float
    """When it was asked, by the monotonic clock: a later event may not be in it."""
    answered: bool = True
    job: Job | None = None
    cause: StopCause | None = None
    """Why Slurm stops the job."""
    runs: bool = True
    """False once the job is no longer RUNNING: Slurm is ending its processes."""
    ends: float = math.inf
    """When its time is over, by the monotonic clock."""
    margin: float = MARGIN_SECONDS
    """Seconds before that at which the ranks are told to stop."""
    kill_wait: float = 30.0
    """Seconds between a signal of Slurm's to a step and its SIGKILL."""
    down: frozenset[str] = frozenset()
    """Nodes of the job that Slurm calls down."""


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Agents that will not come."""

    words: str
    nodes: frozenset[str] = frozenset()
    """The nodes that are to blame; empty where all failed alike, which is no node's fault."""


class Allocation(Protocol):
    """The job of a supervisor. The loop calls all but `look` in its main thread."""

    host: str
    """The address that agents are to call; empty is every interface."""
    signals_stop: bool
    """True if a signal to the supervisor is a person's wish; else it is Slurm's, and Slurm is asked why."""
    attempt_seconds: float
    """The time limit of each attempt, where no scheduler keeps one for the job."""

    def nodes(self) -> list[str]:
        """Return the names of the job's nodes, in Slurm's order; `local` on this machine, whose agent has all ranks."""

    def start_agents(self, nodes: Sequence[str], attempt: int) -> None:
        """Start agents on those nodes for which no start is under way. srun's words are logged with the attempt."""

    def launch_failure(self, missing: Collection[str], look: Look) -> LaunchFailure | None:
        """Return why agents that did not say Hello yet will not come; None while they may."""

    def launched(self) -> None:
        """All agents that were wanted are ready: the next start of agents is the first try again."""

    def lost(self, node: str) -> None:
        """The agent of a node is gone."""

    def dead(self) -> list[str]:
        """Return nodes whose agent is known to be dead, before its connection says so."""

    def look(self) -> Look:
        """Ask the scheduler; called in a thread."""

    def room(self, tenure: Tenure, look: Look, placement: Placement) -> Room:
        """Return what the job can still do after an attempt."""

    def again(self, tenure: Tenure, decision: Decision, lost: Collection[str]) -> None:
        """Put the run into the queue again, as the decision says. `lost`: nodes that this start of the job has lost."""
