"""What a line of the list tells of a run, by name: for columns, conditions and sorting. No file is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, nearest

FIXED = (
    "run",
    "name",
    "path",
    "state",
    "step",
    "total_steps",
    "attempts",
    "where",
    "job",
    "seed",
    "checkpoint",
    "goodput",
    "age",
    "eta",
)
"""What every run has a value of, or could have: their names."""

BRANCHES = ("params", "result")
"""Mappings of which a dotted name takes a part, as in `params.lr`."""


FINISHED = "finished"
"""The state of a run that has its result."""

Facts = dict[str, Any]
"""What the list tells of a run, in plain values: less than its status."""

_FROM_STATUS = (
    "state",
    "step",
    "total_steps",
    "cluster",
    "job_id",
    "probably",
    "checkpoint",
    "goodput",
    "result",
    "name",
    "seed",
    "params",
    "values",
    "submitting",
    "submissions",
    "code",
)


def facts_of(status: Mapping[str, Any]) -> Facts:
    """What the list tells of a run with a status, as status.json has it."""
    attempts = status["attempts"]
    facts = {key: status.get(key) for key in _FROM_STATUS}
    facts["attempts"] = len(attempts)
    facts["jobs"] = [one.get("job_id") for one in attempts]
    begun = status.get("total_steps") is not None or bool(status.get("step"))
    facts["has_loop"] = begun or any(one.get("resumed") is not None for one in attempts)
    return facts


@dataclass(frozen=True)
class Summary:
    """A run and what the list tells of it."""

    run: str
    path: str
    facts: Facts
    changed: float = 0.0
    """When something was last journalled, in seconds since the epoch."""
    steps_per_second: float | None = None
    """Of one that runs."""

    def value(self, key: str) -> Any:
        """What the run has of that name; None where it has nothing of it.

        `params.x.y` and `result.x` are parts of those; another name is that of a metric: of the result, else of what
        was logged last.
        """
        if key in FIXED:
            return _FIXED[key](self)
        branch, dot, rest = key.partition(".")
        if branch in BRANCHES:
            value = _part(self.facts.get(branch), rest) if dot else self.facts.get(branch)
            return as_number(value) if branch == "result" else value
        metric = self.found(key)
        return _part(self.facts.get("values"), key) if metric is None else metric

    def found(self, key: str) -> Any:
        """The metric of that name in its result; None where that has none."""
        return as_number(_part(self.facts.get("result"), key))

    def keys(self) -> Iterator[str]:
        """The names of params, results and metrics that it has a value of."""
        yield from _dotted(self.facts.get("params"), "params.")
        yield from _dotted(self.facts.get("result"), "result.")
        yield from _dotted(self.facts.get("result"), "")
        yield from self.facts.get("values") or ()

    @property
    def seconds_left(self) -> float | None:
        """Until it has done its steps, at the speed that it has now; None where that is not known."""
        step, total = self.facts.get("step"), self.facts.get("total_steps")
        if self.facts.get("state") != "running" or not self.steps_per_second or total is None:
            return None
        return float(max(0, total - (step or 0))) / self.steps_per_second

    @property
    def age(self) -> float:
        """Seconds since something was last journalled."""
        return max(0.0, time.time() - self.changed)


_FIXED: dict[str, Callable[[Summary], Any]] = {
    "run": lambda one: one.run,
    "name": lambda one: one.facts.get("name"),
    "path": lambda one: one.path,
    "state": lambda one: str(one.facts.get("state")),
    "step": lambda one: one.facts.get("step"),
    "total_steps": lambda one: one.facts.get("total_steps"),
    "attempts": lambda one: one.facts.get("attempts"),
    "where": lambda one: one.facts.get("cluster"),
    "job": lambda one: one.facts.get("job_id"),
    "seed": lambda one: one.facts.get("seed"),
    "checkpoint": lambda one: one.facts.get("checkpoint"),
    "goodput": lambda one: one.facts.get("goodput"),
    "age": lambda one: one.age,
    "eta": lambda one: one.seconds_left,
}


def as_number(value: Any) -> Any:
    """A value of a result; one that is no finite number stands there as a text, since JSON has none."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def comparable(summaries: Iterable[Summary], key: str) -> Callable[[Summary], Any]:
    """What counts of some runs where they are compared by a metric.

    What a run has logged on its way is not compared with what another has found at its end: where one of them has it in
    its result the results count alone, else where one has finished what finished ones have logged last.
    """
    known = [one for one in summaries if one.value(key) is not None]
    if key in FIXED or key.partition(".")[0] in BRANCHES:
        return lambda one: one.value(key)
    if any(one.found(key) is not None for one in known):
        return lambda one: one.found(key)
    if any(one.value("state") == FINISHED for one in known):
        return lambda one: one.value(key) if one.value("state") == FINISHED else None
    return lambda one: one.value(key)


def _part(value: Any, name: str) -> Any:
    """The value of a dotted name in nested mappings, whose own names may have dots; None where there is none."""
    if not isinstance(value, Mapping):
        return None
    if name in value:
        return value[name]
    parts = name.split(".")
    for at in range(len(parts) - 1, 0, -1):
        if (head := ".".join(parts[:at])) in value:
            return _part(value[head], ".".join(parts[at:]))
    return None


def _dotted(value: Any, prefix: str) -> Iterator[str]:
    for name, one in value.items() if isinstance(value, Mapping) else ():
        if isinstance(one, Mapping):
            yield from _dotted(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def check_keys(keys: Iterable[str], option: str, summaries: Iterable[Summary]) -> None:
    """Refuse, by an InputError, a name that none of some runs has anything of; where there is no run, none is."""
    unknown = [key for key in keys if key not in FIXED and key not in BRANCHES]
    if not unknown:
        return
    known = {name for summary in summaries for name in summary.keys()}  # noqa: SIM118 - no mapping
    for key in unknown if known else ():
        if key not in known:
            hint = nearest_key(key, known)
            raise InputError(f"{option}: no run has {key!r}{hint or f'; there are {_some(known)}'}")


def nearest_key(key: str, known: Iterable[str]) -> str:
    """`; did you mean 'params.lr'?` for the nearest name, be it that its beginning was left out."""
    names = sorted({*known, *FIXED})
    ends = [name for name in names if name.rpartition(".")[2] == key]
    return f"; did you mean {ends[0]!r}?" if ends else nearest(key, names)


def _some(known: Iterable[str]) -> str:
    names = sorted(name for name in known if not name.startswith("result."))
    return ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
