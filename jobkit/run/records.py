"""What one process of a run leaves in a file for another: a typed record each, with one way to read and to write it.

A record that is missing, not whole or of another shape reads as None: whoever wrote it may have been killed, or may be
an older jobkit. What is in a file and not in the record is ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jobkit.run.files import read_json, write_json

R = TypeVar("R")


def read(kind: type[R], file: Path) -> R | None:
    """The record in a file; None where there is none."""
    value = read_json(file, fresh=True)  # another host may have just made it
    if not isinstance(value, dict):
        return None
    try:
        return of(kind, value)
    except TypeError:  # a field that every record of the kind has is not there
        return None


def of(kind: type[R], value: Mapping[str, Any]) -> R:
    """The record in a JSON object; what else the object holds is left. Raises TypeError where a field is missing."""
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: item for key, item in value.items() if key in names})


def write(file: Path, record: Any, *, durable: bool = True) -> None:
    """Replace a file by a record, less what is not known; raises OSError when the disk does not take it."""
    write_json(file, known(record), durable=durable)


def known(record: Any) -> dict[str, Any]:
    """Plain JSON values of a record: what is known."""
    return {key: value for key, value in dataclasses.asdict(record).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the running attempt says it is, a few times a second at most: a view, never the truth.

    Written by rank 0 (worker/reporter.py); read by followers, `jobkit status`, the watchdog and the diagnosis.
    """

    attempt: int
    time: float
    """When it was written, in seconds since the epoch."""
    step: int | None = None
    """Steps done; None before the loop."""
    total_steps: int | None = None
    steps_per_second: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    """The newest of what the function has logged, the first few: for the progress bar and the list of runs."""
    evaluation: dict[str, int] | None = None
    """{done, total} in samples, during one."""
    peak_bytes: int | None = None
    """The most host memory that any rank has had resident."""
    beats: int = 0
    """Heartbeats so far: one a step, batch of an evaluation or end of a checkpoint."""
    training: bool = False
    """Whether the loop is under way: before and after it nothing is known of how long things take."""
    slowest: float = 0.0
    """The longest time between two heartbeats in the loop, in seconds."""
    slowest_before: float = 0.0
    """That of the attempts before."""
    stopping: bool = False
    """Whether the ranks have agreed to stop, and are writing the last checkpoint."""
    idle: float = 0.0
    """Seconds since the last heartbeat."""

    def __post_init__(self) -> None:
        times = (self.time, self.idle, self.slowest, self.slowest_before)
        numbers = (self.attempt, *times, self.step or 0, self.total_steps or 0)
        if not (isinstance(self.values, dict) and all(isinstance(one, (int, float)) for one in numbers)):
            raise TypeError("progress of another shape")

    @property
    def last_beat(self) -> float:
        """When something was last done, in seconds since the epoch."""
        return self.time - self.idle


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others, in its own seconds a step: those in which it does not wait for others."""

    rank: int
    host: str
    seconds: float
    median: float
    """Of all ranks."""
    factor: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is known of an attempt's end that left no time to save; in JSON, without what is not known."""

    error: str | None = None
    rank: int | None = None
    """The first to fail."""
    step: int | None = None
    """The step it was in; None outside the loop."""
    samples: list[int] | None = None
    """Ids of its samples in that step."""
    traceback: str | None = None
    node: str | None = None
    peak_bytes: int | None = None
    everywhere: bool | None = None
    """Whether all nodes failed with this error, so that it is not the fault of one of them."""
    final: bool | None = None
    """Whether any other attempt would end with this error too."""
    not_finite: bool | None = None
    """Whether a loss was no number, and the step is to be repeated."""
    faulty_node: str | None = None
    """Slurm's name of a node on which a step had another result than when it was repeated."""


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why jobkit itself has asked an attempt to stop; absent when somebody else did."""

    cause: str
    """One of run.status.CAUSES."""
    error: str | None = None
    grace: float | None = None
    """Seconds that its ranks get to save until they are killed; None where only the scheduler ends them."""


@dataclass(frozen=True, kw_only=True)
class GivenValues:
    """What a submission gave a run beside its YAML, of the keys that decide what it computes: in its journal entry."""

    values: dict[str, Any] = field(default_factory=dict)
    """By dotted keys, what is secret masked."""
    inherited: list[str] = field(default_factory=list)
    """Of the keys those that were given to the run it starts from, and not to itself."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Installed modules that ranks have imported until their first step: their parent can import them before."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The attempt that owns a run directory: no other one may write."""

    attempt: int
    job_id: str | None = None
    host: str | None = None
    process: str | None = None
    """Which process began the attempt, as run/processes.py names it."""
    node: str | None = None
    """Slurm's name of the node that the batch script runs on."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What a rank that fails writes down for the end of the attempt to find."""

    time: float
    rank: int
    error: str
    """Type and message, in a line."""
    traceback: str = ""
    step: int | None = None
    """The step it was in; None outside the loop."""
    samples: list[int] = field(default_factory=list)
    """Ids of this rank's samples in that step."""
    node: str | None = None
    node_index: int | None = None
    alone: bool = False
    """Whether the ranks did not form the group they were started for: equal errors on all nodes mean little then."""
    disk: bool = False
    """Whether a full disk is the cause."""
    final: bool = False
    """Whether any other attempt would end with this error too."""
    out_of_memory: str | None = None
    """`GPU`, `npu` or another device that is no GPU, or `host`, where that is the reason."""
    peak_bytes: int | None = None
    not_finite: bool | None = None
    faulty_node: str | None = None
    """As the Failure's."""


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """What a rank would have of one model that was given to ctx.parallelize."""

    name: str
    """Of its class."""
    parameters: int
    own: int
    """Of the parameters, those that the rank has."""
    weights: int
    """Bytes of this rank; so are the next two."""
    gradients: int
    optimizer: int | None = None
    """None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """How far a training function came on a rank that only pretends: worker/model_check.py for `--check-model`."""

    rank: int
    models: list[CheckedModel]
    refused: str | None = None
    """Why no run of this could train."""
    problem: str | None = None
    """What else the function failed with, so that the rest of it was not looked at."""
    reached: str | None = None
    """Where it was left: `ctx.steps`, or something else that needs a run."""
