"""Conditions on runs, as `--where params.lr>=0.03`: read from a text, and whether a run meets one. No file is read."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run.status import State
from jobkit.run.summary import Summary, check_keys

FORM = "KEY OP VALUE, OP one of == = != <= >= < > ~ (a regular expression), as in 'params.lr>=0.03'"

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(==|!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)

_NULL = ("null", "none")

_OTHER_WORDS = {
    State.QUEUED: ("pending", "pd", "waiting", "submitted", "configuring"),
    State.RUNNING: ("r", "active", "alive", "live", "started", "training"),
    State.INTERRUPTED: ("timeout", "preempted", "node_fail", "stopped", "suspended", "paused", "killed", "lost"),
    State.FINISHED: ("completed", "complete", "cd", "done", "success", "succeeded", "successful", "ok", "ended"),
    State.FAILED: ("error", "errors", "crashed", "failure", "broken", "out_of_memory", "oom", "dead"),
    State.CANCELLED: ("canceled", "ca", "aborted", "deleted"),
}
"""What Slurm and others call the states."""

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """One condition on a run."""

    key: str
    operator: str
    """One of `=`, `!=`, `<`, `<=`, `>`, `>=`, `~`."""
    text: str
    """What is behind the operator."""

    def is_met_by(self, value: Any) -> bool:
        """Whether a value meets it; one that is not there, or cannot be compared with the text, does not."""
        is_null = self.text.lower() in _NULL
        if value is None:
            return self.operator == "=" and is_null
        if self.operator == "!=" and is_null:
            return True
        if self.operator == "~":
            return re.search(self.text, as_text(value)) is not None
        wanted = _like(value, self.text)
        if wanted is None or _is_nan(value) != _is_nan(wanted):
            return False
        if self.operator in ("=", "!="):
            is_equal = value == wanted or _is_nan(value)
            return is_equal == (self.operator == "=")
        if isinstance(value, str) and _is_number(self.text):
            return False
        return isinstance(value, (int, float, str)) and _ORDERS[self.operator](value, wanted)


def parse(text: str) -> Condition:
    """The condition that a text says; InputError for a text that is none."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise InputError(f"--where {text!r}: expected {FORM}")
    condition = Condition(match[1], "=" if match[2] == "==" else match[2], match[3])
    if condition.operator == "~":
        try:
            re.compile(condition.text)
        except re.error as error:
            raise InputError(f"--where {text!r}: {condition.text!r} is no regular expression: {error}") from None
    return condition


def parse_states(text: str) -> frozenset[str]:
    """The states in `queued,running`; InputError for one that there is not."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    names = [str(state) for state in State]
    for word in words:
        if word not in names:
            raise InputError(f"--state {word!r}: allowed: {', '.join(names)}{_meant_state(word.lower(), names)}")
    if not words:
        raise InputError(f"--state {text!r}: allowed: {', '.join(names)}, several with commas between them")
    return frozenset(words)


def _meant_state(word: str, names: Sequence[str]) -> str:
    """`; did you mean 'finished'?` for what others call a state, or nearly one."""
    meant = next((str(state) for state, words in _OTHER_WORDS.items() if word in words), None)
    return nearest(meant or word, names)


def select(summaries: Sequence[Summary], conditions: Iterable[Condition], states: Iterable[str] = ()) -> list[Summary]:
    """Those of some runs that meet all conditions and are in one of `states`, where there are any.

    InputError for a key that none of the runs has.
    """
    conditions, states = list(conditions), frozenset(states)
    check_keys((one.key for one in conditions), "--where", summaries)
    return [
        summary
        for summary in summaries
        if (not states or summary.value("state") in states)
        and all(one.is_met_by(summary.value(one.key)) for one in conditions)
    ]


def as_text(value: Any) -> str:
    """A value as a person types it: `true` and `[1, 2]`, as in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _like(value: Any, text: str) -> Any:
    """What a text says in the kind of a value; None where it says nothing of that kind."""
    if isinstance(value, str):
        return text
    try:
        if isinstance(value, bool):
            return {"true": True, "false": False}.get(text.lower())
        if isinstance(value, (int, float)):
            return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)  # large ints are no floats
        return json.loads(text)
    except ValueError:
        return None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
