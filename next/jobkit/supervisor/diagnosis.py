"""Why an attempt ended: a pure function of what the supervisor saw and of what the ranks left.

    Facts (exits, lost nodes, Slurm's word) + ends/<attempt>/*.json --diagnose()--> Verdict --> Ended in the journal

The first cause by arrival counts, not by clocks, which differ between nodes. Nothing is read out of the messages of
libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobkit.run.records import Cause
from jobkit.supervisor.protocol import Exited

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node that is gone, or that nothing could be started on."""

    node: str
    why: str
    at: int = 0
    """How many exits had arrived when its connection was *closed* (not when the supervisor gave the node up): it beats
    exits that follow, which are its consequences."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the supervisor saw of the end of an attempt."""

    exits: Sequence[tuple[Exited, str]] = ()
    """Ranks that ended, in order of arrival, each with the name of its node."""
    reported: frozenset[int] | None = None
    """Ranks whose End lay there when the first exit with a failure arrived: an End that came later is a consequence.
    None where nobody looked: then all Ends count."""
    lost_nodes: Sequence[LostNode] = ()
    """In order of arrival. After a signal of Slurm's a lost agent is no lost node."""
    launch_error: str | None = None
    """Srun's words where it could start nothing and named no node; a node that it named is a LostNode."""
    asked: tuple[Cause, str] | None = None
    """What the supervisor itself ended the ranks for: timeout, hang, cancelled, preempted or stopped, and words for
    `error`. The first one counts."""
    signalled: bool = False
    """True if an agent was sent a signal (by Slurm, or by a person) that it passed on to its ranks."""
    job: Job | None = None
    """Slurm's record of the job; None for silence, and on this machine."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cause of an attempt's end, and what is known of it: fields of `Ended`."""

    cause: Cause
    error: str | None = None
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    traceback: str | None = None
    samples: list[int] | None = field(default=None)
    everywhere: bool = False
    final: bool = False
