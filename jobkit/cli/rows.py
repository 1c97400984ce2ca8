"""Rows of `jobkit list`: what a run has under each name; `--where` conditions on these values, and `--sort`.

    status.json (one read a run) --read_rows--> Row.values["params.lr"], ["state"], ["train/loss"]
    parse("params.lr>=0.03").is_met_by(0.1)     # True

Only runs that have not finished cost more: their progress.json, and one question to Slurm for all of them. list.py and
diff.py show what is made here.
"""

from __future__ import annotations

import json
import operator
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jobkit.errors import InputError, nearest
from jobkit.run.after import waits_for
from jobkit.run.files import leaves
from jobkit.run.journal import cached_status, read_status
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.run.secrets import masked_status
from jobkit.run.status import UNDER_WAY, State
from jobkit.run.view import View, look

T = TypeVar("T")

# fmt: off
FACTS = ("run", "state", "step", "total_steps", "eta", "waits", "attempts", "checkpoint", "age", "where", "job",
         "reason", "seed", "name", "path", "params", "result")
# fmt: on
"""Names that every run has, or could have; other names are `params.x`, `result.x` and metrics."""


@dataclass(slots=True)  # frozen, each takes four times as long
class Row:
    """A run in the list."""

    run: RunDir
    status: Mapping[str, Any]
    """The content of status.json."""
    logged: Mapping[str, Any]
    """The newest values of a run that has not finished."""
    params: Mapping[str, Any]
    """`params.lr` -> 0.1, also in `values`."""
    results: Mapping[str, Any]
    """The leaves of the result, also in `values`."""
    values: Mapping[str, Any]
    """Name -> value: facts, params, results and metrics; None, or no entry, where there is nothing."""

    def as_json(self) -> dict[str, Any]:
        """Return the whole status and the list's own fields, for programs."""
        added = ("run", "path", "state", "step", "total_steps", "eta", "waits", "job")
        return {**self.status, **{key: self.values[key] for key in added}, "values": dict(self.logged)}


def read_rows(runs: Iterable[RunDir], keys: Iterable[str] = ()) -> list[Row]:
    """Return the rows of runs; a run that cannot be read is left out, with a line on standard error.

    `keys` are names that were typed: for a metric among them finished runs' progress.json is read too.
    """
    wants_metrics = any(key not in FACTS and not key.startswith(("params.", "result.")) for key in keys)
    read: list[tuple[RunDir, Mapping[str, Any]]] = []
    for run in runs:
        try:
            read.append((run, cached_status(run) or read_status(run).as_dict()))
        except OSError as error:  # another user's, or removed in this moment
            print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
    under_way = [(run, read_status(run)) for run, status in read if status.get("state") in UNDER_WAY]
    views = {view.run.folder: view for view in look(under_way)}
    waiting = {}
    if any(view.job is None for view in views.values()):
        from jobkit.agent.devices import turns  # most lists need no look at this machine

        waiting = turns()
    rows, now = [], time.time()
    for run, status in read:
        view = views.get(run.folder)
        if view is not None and view.status.state not in UNDER_WAY:  # it ended since
            status, view = view.status.as_dict(), None
        status = masked_status(status)
        is_finished = status.get("state") == "finished"
        progress = run.progress() if wants_metrics or not is_finished else None
        # After a rewind, what was logged is of a step that is set aside.
        logged = progress.values if progress is not None and status.get("rewound") is None else {}
        facts = _facts(run, status, view, None if is_finished else progress, now)
        facts["waits"] = _waits(view) or waiting.get(run.folder)
        params, results = dict(leaves(facts["params"], "params.")), dict(leaves(facts["result"], ""))
        values = {**logged, **results, **{f"result.{name}": results[name] for name in results}, **params, **facts}
        rows.append(Row(run, status, logged, params, results, values))
    return rows


def _waits(view: View | None) -> str | None:
    """Return the runs that a run comes after, else its next try, else Slurm's reason why its job waits."""
    if view is None:
        return None
    reason = view.job.reason if view.job is not None and view.is_pending else None
    return waits_for(view.run, view.status) or view.waiting or reason


def _facts(
    run: RunDir, status: Mapping[str, Any], view: View | None, progress: Progress | None, now: float
) -> dict[str, Any]:
    submitted, attempts = status.get("submitted", {}), status.get("attempts", ())
    config, ends = submitted.get("config", {}), [attempt["ended"] for attempt in attempts[::-1] if "ended" in attempt]
    if progress is not None and (not attempts or progress.attempt != attempts[-1]["number"]):
        progress = None
    step = progress.step if progress is not None else _newest(ends, "last_step")
    total = progress.total_steps if progress is not None else None
    if (back := status.get("rewound")) is not None:
        step, ends = back, [{"durable_step": back}]
    state = str(view.state) if view is not None else status.get("state", "new")
    reason = None
    if state in (State.FAILED, State.INTERRUPTED, State.LOST):
        reason = (view.words if view is not None else status.get("reason")) or None
    eta = None
    if state == State.RUNNING and progress is not None and step is not None and total and progress.steps_per_second:
        eta = round(max(0, total - step) / progress.steps_per_second, 1)
    return {
        "run": run.name,
        "state": state,
        "step": step,
        "total_steps": total,
        "eta": eta,
        "attempts": len(attempts),
        "checkpoint": run.durable_step() if view is not None else _newest(ends, "durable_step"),
        "age": round(max(0.0, now - status.get("since", 0.0)), 1),
        "where": (view and view.elsewhere) or submitted.get("entry") or submitted.get("scheduler"),
        "job": view.job_id if view is not None else status.get("job_id"),
        "reason": reason,
        "seed": config.get("seed"),
        "name": config.get("name"),
        "path": run.folder,
        "params": config.get("params"),
        "result": status.get("result"),
    }


def _newest(ends: Iterable[Mapping[str, Any]], field: str) -> Any:
    for end in ends:
        if field in end:
            return end[field]
    return None


def check_keys(keys: Iterable[str], option: str, rows: Sequence[Row]) -> None:
    """Raise InputError for a name that no row has anything of; without rows no name is wrong."""
    unknown = [key for key in keys if key not in FACTS]
    names = {name for row in rows for name in row.values} if unknown else set()
    for key in unknown if names else ():
        if key not in names:
            ends = [name for name in sorted(names) if name.rpartition(".")[2] == key]
            hint = f"did you mean {ends[0]!r}?" if ends else nearest(key, sorted(names))
            raise InputError(key=option, found=key, allowed=f"one of {', '.join(sorted(names)[:24])}", hint=hint)


# Conditions and order

FORM = "KEY OP VALUE with one of = != <= >= < > ~ (a regular expression), as in 'params.lr>=0.03'"

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(=|!=|<=|>=|<|>|~)\s*((?![=<>]).+?)\s*", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Condition:
    """One condition on a run."""

    key: str
    operator: str
    text: str
    """The value as it was typed."""

    def is_met_by(self, value: Any) -> bool:
        """Return whether a value meets it; None meets `=null` alone, and no text is above or below a number."""
        if self.operator == "~":
            return value is not None and re.search(self.text, str(value)) is not None
        try:
            operand = json.loads(self.text)
        except ValueError:  # a text without quotes
            operand = self.text
        is_equal = value == operand or (value is not None and str(value) == self.text)
        if self.operator == "=":
            return is_equal
        if self.operator == "!=":
            return not is_equal and value is not None
        try:
            return bool(_ORDERS[self.operator](value, operand))
        except TypeError:
            return False


def parse(text: str) -> Condition:
    """Return the condition of a text. Raises InputError."""
    match = _CONDITION.fullmatch(text)
    try:
        if match is None or (match[2] == "~" and not re.compile(match[3])):
            raise ValueError
    except (ValueError, re.error) as error:
        raise InputError(str(error), key="--where", found=text, allowed=FORM) from None
    return Condition(match[1], match[2], match[3])


def ordered(items: Iterable[T], value_of: Callable[[T], Any], *, largest_first: bool) -> list[T]:
    """Return items by a value, numbers before texts; those without one come last in both directions."""

    def rank(item: T) -> tuple[bool, Any]:
        value = value_of(item)
        return (False, value) if isinstance(value, (int, float)) else (True, str(value))

    with_value = [item for item in items if value_of(item) is not None]
    return sorted(with_value, key=rank, reverse=largest_first) + [item for item in items if value_of(item) is None]
