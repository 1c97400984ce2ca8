"""Runs that start after others: which runs a run waits for, and what follows from their states. Nothing is written.

    Submitted.after --awaited--> RunDir each --states--> {"digits-11f5f19c": "running"} --decide--> Turn(wait)

The submission, the supervisor and the commands that show runs ask here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status


@dataclass(frozen=True)
class Turn:
    """The next action of a run that comes after others."""

    action: Literal["start", "wait", "end"]
    words: str = ""
    """The runs that it waits for, or why it ends."""


def decide(states: Mapping[str, State | None]) -> Turn:
    """Return what a run does whose predecessors are in these states; None is a run that was removed.

    decide({"digits-11f5f19c": State.RUNNING})     # Turn("wait", "digits-11f5f19c (running)")
    """
    if ends := [f"{name} {end}" for name, state in states.items() if (end := _end(state))]:
        return Turn("end", f"{'; '.join(ends)}; this run starts after that run is finished: the same command")
    waits = [f"{name} ({state})" for name, state in states.items() if state != State.FINISHED]
    return Turn("wait", ", ".join(waits)) if waits else Turn("start")


def _end(state: State | None) -> str:
    """Return the end of a run that cannot finish by itself; empty for one that can, or has."""
    match state:
        case State.FINISHED | State.QUEUED | State.RUNNING:
            return ""
        case State.FAILED:
            return "has failed"
        case State.CANCELLED:
            return "was cancelled"
        case State.LOST:
            return "has lost its job"
        case State.NEW | State.INTERRUPTED:
            return f"is {state}"
        case None:
            return "was removed"


def awaited(run: RunDir, status: Status) -> list[RunDir]:
    """Return the runs that must be finished first; none once an attempt of this submission has begun."""
    submitted = status.submitted
    if submitted is None or status.attempts_of_submission():
        return []
    return predecessors(run, submitted.after)


def predecessors(run: RunDir, names: Sequence[str]) -> list[RunDir]:
    """Return the runs with these names: beside `run`, or by their paths."""
    return [RunDir(run.path.parent / name) for name in names]


def waits_for(run: RunDir, status: Status) -> str:
    """Return the unfinished runs that a queued run waits for, as their journals say; empty where it waits for none."""
    if status.state != State.QUEUED:
        return ""
    states = {other.name: read_status(other).state if other.exists() else None for other in awaited(run, status)}
    turn = decide(states)
    return turn.words if turn.action == "wait" else ""


def waits_on(run: RunDir, target: RunDir) -> bool:
    """Return whether an unfinished run waits for `target`, over however many runs between the two."""
    status = read_status(run)
    return status.state != State.FINISHED and any(
        other.path == target.path or waits_on(other, target) for other in awaited(run, status)
    )
