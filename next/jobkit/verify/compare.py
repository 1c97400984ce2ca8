"""The first difference between the traces of two runs, and what lies behind a run's trace.

    trace/<attempt>/<rank>.jsonl of A and B --read_trace--> Trace --first_difference--> Difference | None

cli/verify.py calls it, and explain.py makes lines of the result. Nothing here starts or stops a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from jobkit.run.rundir import RunDir
from jobkit.verify.plan import Course

Kind = Literal["restored state", "samples", "values", "generators", "state", "result"]

IGNORED = ("perf/",)
"""Beginnings of the names of values that measure time."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's record of a boundary."""

    rank: int
    attempt: int
    step: int
    event: Literal["restored", "boundary", "evaluated", "end"]
    epoch: int = 0
    generators: str = ""
    samples: tuple[int, ...] = ()
    """Ids of the samples of the step that ended here."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values logged since the boundary before: name -> raw bits in hex."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Digest of each tracked entry."""
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two runs differ."""

    kind: Kind
    step: int
    rank: int
    attempt: int
    """Of the second run."""
    name: str = ""
    """The value or the entry that differs."""
    first: Any = None
    second: Any = None


Trace = Mapping[int, Sequence[Place]]
"""The places of each rank, in the order of their writing, attempt by attempt."""


def read_trace(run: RunDir) -> Trace:
    """Return a run's trace. A last line that is not whole, of a killed rank, is left out."""
    trace: dict[int, list[Place]] = {}
    for folder in sorted(run.trace_folder.iterdir(), key=lambda folder: int(folder.name)):
        for file in folder.glob("*.jsonl"):
            places = trace.setdefault(int(file.stem), [])
            places += (_place(int(file.stem), int(folder.name), line) for line in _whole_lines(file.read_text("utf-8")))
    return trace


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _place(rank: int, attempt: int, line: dict[str, Any]) -> Place:
    values = {name: bits for name, bits in line.get("values", {}).items() if not name.startswith(IGNORED)}
    fields = {name: line[name] for name in ("step", "event", "epoch", "generators", "state", "result") if name in line}
    return Place(rank=rank, attempt=attempt, samples=tuple(line.get("samples", ())), values=values, **fields)


def course_of(trace: Trace) -> Course:
    """Return the boundaries of a straight run."""
    places = [place for place in trace[0] if place.event != "end"]
    epochs = [(before, after) for before, after in pairwise(places) if before.epoch != after.epoch]
    return Course(
        first=places[0].step,
        last=places[-1].step,
        evaluations=tuple(place.step for place in places if place.event == "evaluated"),
        epoch_ends=tuple(after.step for _, after in epochs),
    )


def first_difference(first: Trace, second: Trace, *, ignored: frozenset[str] = frozenset()) -> Difference | None:
    """Return the earliest difference of two runs; None where they are equal.

    At one boundary the order is: restored state, samples, values, generators, state. `ignored` are names of values that
    also differ between two straight runs.
    """
    differences = [
        difference
        for rank in sorted(second)
        if (difference := _of_rank(first.get(rank, ()), second[rank], ignored)) is not None
    ]
    return min(differences, key=lambda difference: (difference.attempt, difference.step), default=None)


def _of_rank(first: Sequence[Place], second: Sequence[Place], ignored: frozenset[str]) -> Difference | None:
    expected = {(place.step, place.event): place for place in first}
    for place in second:
        # A restored state is the state of that boundary in the straight run, before its evaluations.
        event = "boundary" if place.event == "restored" else place.event
        reference = expected.get((place.step, event))
        if reference is None:
            if place.event == "restored" and place.step == first[0].step:
                reference = first[0]
            else:
                continue
        kind, name, values = _compare(reference, place, ignored)
        if kind is not None:
            return Difference(
                kind=kind, step=place.step, rank=place.rank, attempt=place.attempt, name=name,
                first=values[0], second=values[1],
            )  # fmt: skip
    return None


def _compare(first: Place, second: Place, ignored: frozenset[str]) -> tuple[Kind | None, str, tuple[Any, Any]]:
    if second.event != "restored":
        if first.samples != second.samples:
            return "samples", "", (first.samples, second.samples)
        for name in sorted(set(first.values) | set(second.values)):
            if name not in ignored and first.values.get(name) != second.values.get(name):
                return "values", name, (first.values.get(name), second.values.get(name))
    if first.generators != second.generators:
        return "generators", "", (first.generators, second.generators)
    for name in sorted(set(first.state) | set(second.state)):
        if first.state.get(name) != second.state.get(name):
            kind: Kind = "restored state" if second.event == "restored" else "state"
            return kind, name, (first.state.get(name), second.state.get(name))
    if first.result != second.result:
        return "result", "", (first.result, second.result)
    return None, "", (None, None)


def differing_values(first: Trace, second: Trace) -> frozenset[str]:
    """Return the names of values that differ between two straight runs: times, or the program's nondeterminism."""
    names = set()
    for rank, places in first.items():
        others = {(place.step, place.event): place for place in second.get(rank, ())}
        for place in places:
            other = others.get((place.step, place.event))
            if other is not None:
                names |= {name for name, bits in place.values.items() if other.values.get(name) != bits}
    return frozenset(names)
