"""The state of a run: a pure fold of its journal. status.json is this, and the only cache of it.

submitted ---> queued --attempt began--> running --attempt ended--> queued | running | interrupted | failed
                                         any --cancelled--> cancelled          running --finished--> finished
                                         any --rewound--> interrupted
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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

State = Literal["new", "queued", "running", "interrupted", "failed", "cancelled", "finished"]
"""interrupted: the same command continues. queued: a job is, or was when somebody last knew, in the queue."""


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
    state: State = "new"
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
        return self.state in ("interrupted", "failed", "cancelled", "finished")

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
            return replace(status, state="queued", submitted=event, person_submission=number, reason="")
        case Refused():
            return replace(status, state="interrupted", reason=event.error) if event.token == status.token else status
        case AttemptBegan():
            queued = None if event.how == "in place" else before
            attempt = Attempt(number=event.attempt, submission=status.person_submission, began=event, queued=queued)
            return replace(status, state="running", attempts=[*status.attempts, attempt], reason="", rewound=None)
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
            return replace(status, state="queued", reason=event.reason)
        case Cancelled():
            return replace(status, state="cancelled", reason=event.reason)
        case Rewound():
            reason = f"went back to step {event.step}; what came after it is in {event.branch}"
            return replace(status, state="interrupted", result=None, rewound=event.step, reason=reason)
        case Finished():
            return replace(status, state="finished", result=event.result, reason="")
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
    states: dict[str, State] = {"in_place": "running", "requeue": "queued", "successor": "queued", "fail": "failed"}
    return states.get(ended.next, "interrupted")
