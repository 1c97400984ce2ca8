"""What a line of the list tells of a run, by name: for columns, conditions and sorting."""

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


@dataclass(frozen=True)
class Summary:
    """A run and its status in plain values, as status.json has them."""

    run: str
    path: str
    status: Mapping[str, Any]
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
            return _part(self.status.get(branch), rest) if dot else self.status.get(branch)
        metric = _part(self.status.get("result"), key)
        return _part(self.status.get("values"), key) if metric is None else metric

    def keys(self) -> Iterator[str]:
        """The names of params, results and metrics that it has a value of."""
        yield from _dotted(self.status.get("params"), "params.")
        yield from _dotted(self.status.get("result"), "result.")
        yield from _dotted(self.status.get("result"), "")
        yield from self.status.get("values") or ()

    @property
    def seconds_left(self) -> float | None:
        """Until it has done its steps, at the speed that it has now; None where that is not known."""
        step, total = self.status.get("step"), self.status.get("total_steps")
        if self.status.get("state") != "running" or not self.steps_per_second or total is None:
            return None
        return float(max(0, total - (step or 0))) / self.steps_per_second

    @property
    def age(self) -> float:
        """Seconds since something was last journalled."""
        return max(0.0, time.time() - self.changed)


def _attempts(summary: Summary) -> int:
    return len(summary.status.get("attempts") or ())


_FIXED: dict[str, Callable[[Summary], Any]] = {
    "run": lambda one: one.run,
    "name": lambda one: one.status.get("name"),
    "path": lambda one: one.path,
    "state": lambda one: str(one.status.get("state")),
    "step": lambda one: one.status.get("step"),
    "total_steps": lambda one: one.status.get("total_steps"),
    "attempts": _attempts,
    "where": lambda one: one.status.get("cluster"),
    "job": lambda one: one.status.get("job_id"),
    "seed": lambda one: one.status.get("seed"),
    "checkpoint": lambda one: one.status.get("checkpoint"),
    "goodput": lambda one: one.status.get("goodput"),
    "age": lambda one: one.age,
    "eta": lambda one: one.seconds_left,
}


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
            raise InputError(f"{option}: no run has {key!r}{nearest_key(key, known)}; there are {_some(known)}")


def nearest_key(key: str, known: Iterable[str]) -> str:
    """`; did you mean 'params.lr'?` for the nearest name, be it that its beginning was left out."""
    names = sorted({*known, *FIXED})
    ends = [name for name in names if name.rpartition(".")[2] == key]
    return f"; did you mean {ends[0]!r}?" if ends else nearest(key, names)


def _some(known: Iterable[str]) -> str:
    names = sorted(name for name in known if not name.startswith("result."))
    return ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
