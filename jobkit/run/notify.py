"""When a user wants to be told of a run, by a command of their own: `notify:` of their config file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import InvalidValue, nearest
from jobkit.run.duration import FORMS, parse_seconds
from jobkit.run.status import State, Status
from jobkit.run.strict import build

NEVER = "never"

ENDS = ("finished", "failed", "cancelled", "interrupted")
"""How a run may end, as `when` of `notify:` names it; `interrupted` is a run that does not go on by itself."""


def _check_ends(value: list[str]) -> None:
    for one in value:
        if one not in ENDS:
            raise ValueError(f"a list of {', '.join(ENDS)}{nearest(one, ENDS)}")


def _check_count(value: str | int) -> None:
    if value != NEVER and (isinstance(value, str) or value < 0):
        raise ValueError(f"{NEVER}, or a number of preemptions, 0 or more")


def _check_time(value: str | int) -> None:
    try:
        if value != NEVER:
            parse_seconds(value)
    except ValueError:
        raise ValueError(f"{NEVER}, or {FORMS}") from None


@dataclass(frozen=True, kw_only=True)
class Notify:
    """`notify:` of the user's own config file: a command, or a mapping with these keys."""

    command: str = ""
    """What a shell runs; it finds the run in JOBKIT_RUN and the other variables."""
    when: list[str] = field(default_factory=lambda: ["finished", "failed"], metadata={"check": _check_ends})
    """At which ends: `finished`, `failed`, `cancelled`, `interrupted`."""
    preempted: str | int = field(default=NEVER, metadata={"check": _check_count})
    """Also when it was preempted more than so many times since it was submitted."""
    no_progress: str | int = field(default=NEVER, metadata={"check": _check_time})
    """Also when it has done no step for so long while it runs; the time in a queue does not count."""

    @property
    def patience(self) -> float | None:
        """`no_progress` in seconds; None for never."""
        return None if self.no_progress == NEVER else float(parse_seconds(self.no_progress))


def of_value(value: str | Mapping[str, Any]) -> Notify:
    """What a person has written under `notify:`. Raises InvalidValue."""
    if isinstance(value, str):
        return Notify(command=value)
    notify = build(Notify, value, "notify.")
    if not notify.command:
        raise InvalidValue("notify.command", "missing; it is required")
    return notify


def variables(name: str, path: Path, event: str, status: Status) -> dict[str, str]:
    """What the command finds in its environment."""
    text = f"{name}: {event}{status.at_steps}"
    return {
        "JOBKIT_RUN": str(path),
        "JOBKIT_NAME": name,
        "JOBKIT_EVENT": event,
        "JOBKIT_STATE": str(status.state),
        "JOBKIT_STEP": str(status.step),
        "JOBKIT_RESULT": "" if status.result is None else json.dumps(status.result),
        "JOBKIT_ERROR": status.error or "",
        "JOBKIT_TEXT": f"{text}: {status.error.splitlines()[0]}" if status.error else text,
    }


def end_of(status: Status) -> str | None:
    """Which of ENDS a run has come to; None while it goes on."""
    state = State.INTERRUPTED if status.probably and status.state == State.INTERRUPTED else status.state
    return str(state) if str(state) in ENDS else None
