"""The state of a run: a pure fold of its journal. status.json is this, and the only cache of it.

submitted ---> queued --attempt began--> running --attempt ended--> queued | running | interrupted | failed
                                         any --cancelled--> cancelled          running --finished--> finished
                                         any --rewound--> interrupted

journal.py folds; every command and the supervisor read. `lost` is not here: view.py concludes it.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jobkit.run.records import (
    AttemptBegan,
    AttemptEnded,
    Cancelled,
    Event,
    Finished,
    Refused,
    Requeued,
    Rewound,
    Submitted,
)


class State(StrEnum):
    """The state of a run, everywhere: in status.json, in the answers of commands, in `--json`.

    Where it decides something, `match` names all of them: mypy then finds each place that a new one concerns.
    """

    NEW = "new"
    """Nothing was submitted."""
    QUEUED = "queued"
    """A job is, or was when somebody last knew, in the queue."""
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Over, and the same command continues."""
    FAILED = "failed"
    """Over: a person must mend something."""
    CANCELLED = "cancelled"
    FINISHED = "finished"
    LOST = "lost"
    """The journal says queued or running, and its job is gone. No journal has it: run/view.py alone finds it out."""

    @property
    def is_under_way(self) -> bool:
        """True while something happens to the run by itself."""
        match self:
            case State.QUEUED | State.RUNNING:
                return True
            case State.NEW | State.INTERRUPTED | State.FAILED | State.CANCELLED | State.FINISHED | State.LOST:
                return False


UNDER_WAY = frozenset(state for state in State if state.is_under_way)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: the facts of `AttemptBegan`, and once it ended those of `AttemptEnded`."""

    number: int
    submission: int
    """Number of the submission that it belongs to; a supervisor's successor belongs to its person's."""
    began: AttemptBegan
    ended: AttemptEnded | None = None
    queued: float | None = None
    """When its time in the queue began; None for an attempt that began in place."""

    @property
    def nodes(self) -> list[str]:
        return self.began.nodes


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run, as its journal says it.

    status = read_status(run)
    status.state                  # "running"
    status.attempts[-1].ended     # None
    """

    name: str
    state: State = State.NEW
    submitted: Submitted | None = None
    """The newest submission."""
    person_submission: int = 0
    """Number of the newest submission that a person made."""
    attempts: list[Attempt] = field(default_factory=list)
    excluded_nodes: list[str] = field(default_factory=list)
    """The nodes that the run avoids."""
    result: dict[str, Any] | None = None
    reason: str = ""
    """Why the run is in this state, for a person."""
    rewound: int | None = None
    """The step that a person went back to; None once an attempt has begun there."""
    since: float = 0.0
    """When the last event was appended."""

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt that runs, as far as the journal knows."""
        return self.attempt if self.attempt is not None and self.attempt.ended is None else None

    @property
    def token(self) -> str | None:
        """Names the newest submission in its job's comment."""
        return self.submitted.token if self.submitted is not None else None

    @property
    def job_id(self) -> str | None:
        """The job of the newest attempt of the newest submission; None while only the scheduler knows it."""
        return self.attempt.began.job_id if self.attempt and self.attempt.began.token == self.token else None

    @property
    def is_older(self) -> bool:
        """True for a run of an older jobkit, which this one shows and never continues (run/older.py)."""
        return self.token == ""

    @property
    def is_over(self) -> bool:
        return self.state != State.NEW and not self.state.is_under_way

    def attempts_of_submission(self) -> list[Attempt]:
        """Return the attempts since a person last submitted the run: `retry` counts in these."""
        return [attempt for attempt in self.attempts if attempt.submission == self.person_submission]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, without fields that are None or empty."""
        values: dict[str, Any] = _without_nothing({**dataclasses.asdict(self), "job_id": self.job_id})
        return values


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        values = {key: item for key, item in value.items() if item not in (None, [], {}, "")}
        return {key: item if key in _OF_THE_USER else _without_nothing(item) for key, item in values.items()}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


_OF_THE_USER = ("config", "result")
"""Their values stay as they are: a parameter of null is a parameter."""


def fold(status: Status, event: Event) -> Status:
    """Return the Status after one more event."""
    before, status = status.since, replace(status, since=event.time)
    match event:
        case Submitted():
            number = event.number if event.by == "person" else status.person_submission
            return replace(status, state=State.QUEUED, submitted=event, person_submission=number, reason="")
        case Refused():
            is_newest = event.token == status.token
            return replace(status, state=State.INTERRUPTED, reason=event.error) if is_newest else status
        case AttemptBegan():
            queued = None if event.how == "in place" else before
            attempt = Attempt(number=event.attempt, submission=status.person_submission, began=event, queued=queued)
            return replace(status, state=State.RUNNING, attempts=[*status.attempts, attempt], reason="", rewound=None)
        case AttemptEnded():
            attempts = [
                replace(attempt, ended=event) if attempt.number == event.attempt else attempt
                for attempt in status.attempts
            ]
            avoided = list(event.avoid)
            return replace(
                status, attempts=attempts, state=_state_after(event), reason=event.reason, excluded_nodes=avoided
            )
        case Requeued():
            return replace(status, state=State.QUEUED, reason=event.reason)
        case Cancelled():
            return replace(status, state=State.CANCELLED, reason=event.reason)
        case Rewound():
            reason = f"went back to step {event.step}; what came after it is in {event.branch}"
            return replace(status, state=State.INTERRUPTED, result=None, rewound=event.step, reason=reason)
        case Finished():
            return replace(status, state=State.FINISHED, result=event.result, reason="")
    return status


def next_try(ended: AttemptEnded | None) -> str:
    """Return when a run is tried again that makes no progress, and when it is given up; empty where it makes some."""
    if ended is None or ended.next_at is None or ended.tries == 0:
        return ""
    limit = f", given up at {_clock(ended.gives_up_at)} without progress" if ended.gives_up_at is not None else ""
    return f"try {ended.tries + 1} at {_clock(ended.next_at)}{limit}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _state_after(ended: AttemptEnded) -> State:
    match ended.next:
        case "in_place":
            return State.RUNNING
        case "requeue" | "successor":
            return State.QUEUED
        case "fail":
            return State.FAILED
        case "stop":
            pass
    return State.INTERRUPTED  # also for a word of a later jobkit
