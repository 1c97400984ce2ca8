"""The first difference between the traces of two runs.

    trace/<attempt>/<rank>.jsonl of A and B --read_trace--> Trace --first_difference--> Difference | None

runs.py calls it, and explain.py makes lines of the result. Nothing here starts or stops a process.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from jobkit.run.rundir import RunDir
from jobkit.verify.plan import Course

Kind = Literal["restored state", "samples", "values", "generators", "state", "end", "result"]

GENERATORS = "jobkit.generators"
VALUES = "values"
"""The entry of ctx.values: plain values, which may measure time."""

TIMES = "perf/"
"""The names of values that measure time begin with this."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's record of a boundary."""

    rank: int
    attempt: int
    step: int
    event: Literal["restored", "boundary", "evaluated", "end"]
    epoch: int = 0
    samples: list[int] = field(default_factory=list)
    """Ids of the samples of the step that ended here."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values logged since the line before: name -> raw bits in hex."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Digest of each entry."""
    result: Any = None
    files: list[str] = field(default_factory=list)
    """Files outside the runs directory that were written up to the end."""
    locals: Mapping[str, str] = field(default_factory=dict)


Trace = Mapping[int, Sequence[Place]]
"""The places of each rank, in the order of their writing, attempt by attempt."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two runs differ."""

    kind: Kind
    name: str
    """The value or the entry that differs."""
    first: Any
    second: Any
    place: Place
    """Of the second run."""
    reference: Place
    """Of the first run."""


def read_trace(run: RunDir) -> Trace:
    """Return a run's trace. A last line that is not whole, of a killed rank, is left out."""
    trace: dict[int, list[Place]] = {}
    for folder in sorted(run.trace_folder.iterdir(), key=lambda folder: int(folder.name)):
        for file in folder.glob("*.jsonl"):
            rank, lines = int(file.stem), file.read_text("utf-8").split("\n")[:-1]
            trace.setdefault(rank, []).extend(_place(json.loads(line), rank, int(folder.name)) for line in lines)
    return trace


def _place(line: dict[str, Any], rank: int, attempt: int) -> Place:
    names = ("step", "event", "epoch", "samples", "state", "result", "files", "locals")
    values = {name: bits for name, bits in line["values"].items() if not name.startswith(TIMES)}
    return Place(rank=rank, attempt=attempt, values=values, **{name: line[name] for name in names if name in line})


def course_of(trace: Trace) -> Course:
    """Return the boundaries of a straight run."""
    places = [place for place in trace[0] if place.event != "end"]
    return Course(
        first=places[0].step,
        last=places[-1].step,
        evaluations=tuple(place.step for place in places if place.event == "evaluated"),
        epoch_ends=tuple(after.step for before, after in pairwise(places) if before.epoch != after.epoch),
    )


def first_difference(first: Trace, second: Trace, ignored: Collection[str] = ()) -> Difference | None:
    """Return the earliest difference of two runs of the same ranks; None where they are equal.

    At each boundary the order is: restored state, samples, values, generators, state. `ignored` are what
    `differing_values` returns for two straight runs.
    """
    differences = [difference for rank in second for difference in _of_rank(first.get(rank, ()), second[rank], ignored)]
    order = {"restored": 0, "boundary": 1, "evaluated": 2, "end": 3}
    return min(
        differences,
        key=lambda item: (item.place.attempt, item.place.step, order[item.place.event], item.place.rank),
        default=None,
    )


def _of_rank(first: Sequence[Place], second: Sequence[Place], ignored: Collection[str]) -> Iterator[Difference]:
    expected = {_key(place): place for place in first}
    for place in second:
        reference = expected.get(_key(place))
        if place.event == "restored" and reference is None:  # the state of that boundary, before its evaluations
            reference = expected.get((place.step, "boundary"))
        if reference is None:
            continue
        for kind, name, values in _compare(reference, place, ignored):
            yield Difference(
                kind=kind, name=name, first=values[0], second=values[1], place=place, reference=reference
            )  # fmt: skip
            return


def _key(place: Place) -> tuple[int | None, str]:
    """Return the key by which places of two runs are compared. A run has one end, at any step."""
    return (None if place.event == "end" else place.step), place.event


def _compare(first: Place, second: Place, ignored: Collection[str]) -> Iterator[tuple[Kind, str, tuple[Any, Any]]]:
    if first.step != second.step and second.event == "end":
        yield "end", "", (first.step, second.step)
    if second.event != "restored":
        if first.samples != second.samples:
            yield "samples", "", (first.samples, second.samples)
        for name in sorted(set(first.values) | set(second.values)):
            pair = first.values.get(name), second.values.get(name)
            if name not in ignored and pair[0] != pair[1]:
                yield "values", name, (_number(pair[0]), _number(pair[1]))
    for name in sorted(set(first.state) | set(second.state), key=lambda name: (name != GENERATORS, name)):
        pair = first.state.get(name), second.state.get(name)
        if pair[0] != pair[1] and f"ctx.{name}" not in ignored:
            kind: Kind = "generators" if name == GENERATORS else "state"
            yield "restored state" if second.event == "restored" else kind, name, pair
    results = _results(first), _results(second)
    for name in sorted(set(results[0]) | set(results[1])):
        pair = results[0].get(name), results[1].get(name)
        if name not in ignored and pair[0] != pair[1]:
            yield "result", name.removeprefix("result/"), pair


def _number(bits: str | None) -> float | None:
    return None if bits is None else struct.unpack("<d", bytes.fromhex(bits))[0]


def _results(place: Place) -> dict[str, str]:
    """Return the training function's result, by name; as text, because a NaN is not equal to itself."""
    if not isinstance(place.result, dict):
        return {"result": json.dumps(place.result)}
    return {f"result/{name}": json.dumps(value) for name, value in place.result.items()}


def differing_values(first: Trace, second: Trace) -> frozenset[str]:
    """Return the names of plain values that differ between two straight runs, as times and paths do.

    They are names that were logged, `result/<name>` for the result, `ctx.values` for what lies in there, and
    `ctx.jobkit.generators` for a script that does not seed all of them.
    """
    names: set[str] = set()
    for rank, places in first.items():
        others = {_key(place): place for place in second.get(rank, ())}
        for place in places:
            other = others.get(_key(place))
            if other is None:
                continue
            names |= {name for name, bits in place.values.items() if other.values.get(name) != bits}
            names |= {name for name, value in _results(place).items() if _results(other).get(name) != value}
            names |= {f"ctx.{name}" for name in (VALUES, GENERATORS) if place.state.get(name) != other.state.get(name)}
    return frozenset(names)


def seen(trace: Trace) -> list[str]:
    """Return the kinds of values that a straight run shows, in words."""
    places = [place for places in trace.values() for place in places]
    words = ["samples"] if any(place.samples for place in places) else []
    words += ["logged values"] if any(place.values for place in places) else []
    return [*words, "generators", "tracked state"]


def repeated_steps(trace: Trace) -> int:
    """Return how many steps a run took more than once."""
    steps = [place.step for place in trace[0] if place.event == "boundary"]
    return len(steps) - len(set(steps))
