"""What follows an attempt: a pure function of the attempts so far, and of the room that the job has.

    attempts + retry: + Room --decide()--> Decision(action, reason, exclude, pause)

`attempt.close` calls it and writes the decision to the journal; the supervisor carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jobkit.run.records import Next


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the job can still do after an attempt; the allocation knows it."""

    in_place: Callable[[frozenset[str]], bool] = lambda without: False
    """Whether the job runs on, has time left, and has enough nodes without these (`min_nodes` at least)."""
    requeue: Literal["requeue", "successor", "none"] = "none"
    """How the run gets into the queue again; `none` on this machine, which has no queue."""
    spares: int = 0
    """How many unused nodes of the job stand by."""
    elsewhere: Callable[[frozenset[str]], bool] = lambda without: True
    """Whether another start of the job could have nodes enough without these. False where Slurm does not answer: a job
    that excludes too many nodes waits for ever."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows an attempt, and why: a line for the journal and the user."""

    action: Next
    reason: str
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Nodes to give up, beside those excluded before: name -> why."""
    pause: float = 0.0
    """Seconds to wait before a restart in place."""
