"""The first difference between the traces of two runs.

    trace/<attempt>/<rank>.jsonl of A and B --read_trace--> Trace --first_difference--> Difference | None

runs.py calls it, and explain.py makes lines of the result. Nothing here starts or stops a process.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from jobkit.run.records import About, Seen
from jobkit.run.rundir import RunDir
from jobkit.verify.plan import Course

Kind = Literal["restored state", "samples", "values", "generators", "state", "end", "result"]

GENERATORS = "jobkit.generators."
"""The leaves of the state of the random generators begin with this."""

TIMES = "perf/"
"""The names of values that measure time begin with this."""


@dataclass(frozen=True, kw_only=True)
class TraceLine:
    """One rank's record of a boundary."""

    rank: int
    attempt: int
    step: int
    event: Literal["restored", "boundary", "evaluated", "end"]
    epoch: int = 0
    samples: list[int | str] = field(default_factory=list)
    """Ids of the samples of the step that ended here."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values logged since the line before: name -> raw bits in hex."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Digest of each leaf, by its path: `model.0.weight`, `values.best`; of plain values their text."""
    trained: list[str] = field(default_factory=list)
    """Of a restored state: the leaves that are trained."""
    divides_by_three: bool | None = None
    """Whether the global batches of a program with DDP do; None for another program, and where nothing says it."""
    result: Any = None
    files: list[str] = field(default_factory=list)
    """Files outside the runs directory that were written up to the end."""
    seen: Mapping[str, Seen] = field(default_factory=dict)
    """What lives untracked, by the expression that leads to it."""
    about: Mapping[str, About] = field(default_factory=dict)
    """Of expressions of which the lines before have none, or another."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Expressions of things that were too large to look at, and their bytes."""


ORDER = {"restored": 0, "boundary": 1, "evaluated": 2, "end": 3}

Trace = Mapping[int, Sequence[TraceLine]]
"""The lines of each rank, in the order of their writing, attempt by attempt."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first line where two runs differ."""

    kind: Kind
    name: str
    """The value or the entry that differs."""
    first: Any
    second: Any
    line: TraceLine
    """Of the second run."""
    reference: TraceLine
    """Of the first run."""


def read_trace(run: RunDir) -> Trace:
    """Return a run's trace. A last line that is not whole, of a killed rank, is left out."""
    trace: dict[int, list[TraceLine]] = {}
    for folder in sorted(run.trace_folder.iterdir(), key=lambda folder: int(folder.name)):
        for file in folder.glob("*.jsonl"):
            rank, lines = int(file.stem), file.read_text("utf-8").split("\n")[:-1]
            trace.setdefault(rank, []).extend(_trace_line(json.loads(line), rank, int(folder.name)) for line in lines)
    return trace


def _trace_line(line: dict[str, Any], rank: int, attempt: int) -> TraceLine:
    names = ("step", "event", "epoch", "samples", "state", "trained", "divides_by_three", "result", "files", "left_out")
    values = {name: bits for name, bits in line["values"].items() if not name.startswith(TIMES)}
    return TraceLine(
        rank=rank,
        attempt=attempt,
        values=values,
        seen={name: Seen(**item) for name, item in line.get("seen", {}).items()},
        about={name: About(**item) for name, item in line.get("about", {}).items()},
        **{name: line[name] for name in names if name in line},
    )


def course_of(trace: Trace) -> Course:
    """Return the boundaries of a straight run."""
    lines = [line for line in trace[0] if line.event != "end"]
    return Course(
        first=lines[0].step,
        last=max(line.step for line in trace[0]),  # a step that the loop leaves by a break has no boundary
        evaluations=tuple(line.step for line in lines if line.event == "evaluated"),
        epoch_ends=tuple(after.step for before, after in pairwise(lines) if before.epoch != after.epoch),
    )


@dataclass(frozen=True, kw_only=True)
class Excused:
    """What differs between two straight runs, as times and paths do: the program's own, and nobody's fault."""

    values: frozenset[str] = frozenset()
    """Logged values, by name."""
    leaves: frozenset[str] = frozenset()
    """Leaves of the tracked state."""
    results: frozenset[str] = frozenset()
    samples: bool = False
    """True if two straight runs have other samples: then nothing can be compared."""

    @property
    def words(self) -> list[str]:
        return [*sorted(self.values), *sorted(self.leaves), *(f"result.{name}" for name in sorted(self.results))]


def first_difference(first: Trace, second: Trace, excused: Excused = Excused()) -> Difference | None:
    """Return the earliest difference of two runs of the same ranks; None where they are equal.

    At each boundary the order is: restored state, samples, values, generators, state. `excused` is what `differing`
    returns for two straight runs.
    """
    differences = [difference for rank in second for difference in _of_rank(first.get(rank, ()), second[rank], excused)]
    return min(
        differences,
        key=lambda item: (item.line.attempt, item.line.step, ORDER[item.line.event], item.line.rank),
        default=None,
    )


def _of_rank(first: Sequence[TraceLine], second: Sequence[TraceLine], excused: Excused) -> Iterator[Difference]:
    for reference, line in pairs(first, second):
        for kind, name, values in _compare(reference, line, excused):
            yield Difference(
                kind=kind, name=name, first=values[0], second=values[1], line=line, reference=reference
            )  # fmt: skip
            return


def pairs(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> Iterator[tuple[TraceLine, TraceLine]]:
    """Yield each line of a rank's second run with that of its first run, in the order of the second."""
    expected = {_key(line): line for line in first}
    for line in second:
        reference = expected.get(_key(line))
        if line.event == "restored" and reference is None:  # the state of that boundary, before its evaluations
            reference = expected.get((line.step, "boundary"))
        if reference is not None:
            yield reference, line


def _key(line: TraceLine) -> tuple[int | None, str]:
    """Return the key by which lines of two runs are compared. A run has one end, at any step."""
    return (None if line.event == "end" else line.step), line.event


def _compare(first: TraceLine, second: TraceLine, excused: Excused) -> Iterator[tuple[Kind, str, tuple[Any, Any]]]:
    if first.step != second.step and second.event == "end":
        yield "end", "", (first.step, second.step)
    if second.event != "restored":
        if first.samples != second.samples:
            yield "samples", "", (first.samples, second.samples)
        for name in sorted(_differing(first.values, second.values) - excused.values):
            yield "values", name, (_number(first.values.get(name)), _number(second.values.get(name)))
    differing = _differing(first.state, second.state) - excused.leaves
    for name in sorted(differing, key=lambda name: (not name.startswith(GENERATORS), name)):
        kind: Kind = "generators" if name.startswith(GENERATORS) else "state"
        yield (
            "restored state" if second.event == "restored" else kind,
            name,
            (first.state.get(name), second.state.get(name)),
        )
    results = _results(first), _results(second)
    for name in sorted(_differing(*results) - excused.results):
        yield "result", name, (results[0].get(name), results[1].get(name))


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


def _number(bits: str | None) -> float | None:
    return None if bits is None else struct.unpack("<d", bytes.fromhex(bits))[0]


def _results(line: TraceLine) -> dict[str, str]:
    """Return the training function's result, by name; as text, because a NaN is not equal to itself."""
    if not isinstance(line.result, dict):
        return {"": json.dumps(line.result)}
    return {name: json.dumps(value) for name, value in line.result.items()}


def differing(first: Trace, second: Trace) -> Excused:
    """Return what differs between two straight runs."""
    values, leaves, results, samples = set[str](), set[str](), set[str](), False
    for rank, lines in first.items():
        for line, other in pairs(lines, second.get(rank, ())):
            values |= _differing(line.values, other.values)
            leaves |= _differing(line.state, other.state)
            results |= _differing(_results(line), _results(other))
            samples |= line.samples != other.samples
    return Excused(values=frozenset(values), leaves=frozenset(leaves), results=frozenset(results), samples=samples)


def trained(trace: Trace) -> set[str]:
    """Return the leaves that are trained."""
    return {name for lines in trace.values() for line in lines for name in line.trained}


def seen(trace: Trace, excused: Excused = Excused()) -> list[str]:
    """Return what was compared, in words: of what a straight run shows that which is not excused."""
    lines = [line for lines in trace.values() for line in lines]
    results = {name for line in lines if line.result is not None for name in _results(line)}
    words = {
        "samples": any(line.samples for line in lines),
        "logged values": {name for line in lines for name in line.values} - excused.values,
        "generators": any(name.startswith(GENERATORS) for line in lines for name in line.state),
        "tracked state": {name for line in lines for name in line.state} - excused.leaves,
        "the result": results - excused.results,
    }
    return [word for word, is_there in words.items() if is_there]


def repeated_steps(trace: Trace) -> int:
    """Return how many steps a run took more than once."""
    steps = [line.step for line in trace[0] if line.event == "boundary"]
    return len(steps) - len(set(steps))
