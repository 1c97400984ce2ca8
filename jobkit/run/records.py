"""The records of a run: what processes leave in files for each other, and the events of the journal.

    file                          record        written by                    read by
    progress.json                 Progress      rank 0                        supervisor, followers, list
    ends/<attempt>/<rank>.json    RankReport    each rank, as its last act    supervisor
    requests/<kind>.json          Request       commands                      supervisor
    seeds.json                    Seeds         rank 0                        ranks
    start.json                    Origin        the submission, --from        ranks, status
    lease.json                    Lease         supervisor, `rewind`          ranks, agents, every append
    supervisor.json               Contact       supervisor                    its agents
    events.jsonl                  an Event each the holder of the lease       everybody, as the Status that follows

A record that is missing, torn or of another shape reads as None: its writer may have been killed, or be another
jobkit. Fields that a record does not have are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from jobkit.errors import Nature
from jobkit.run.files import read_json, write_json

R = TypeVar("R")

Cause = Literal[
    "finished",
    "preempted",
    "timeout",
    "cancelled",
    "stopped",  # by the user, here: Ctrl-C or a signal to the supervisor
    "crashed",
    "killed",
    "out_of_memory",
    "hang",
    "node_failure",
    "setup",  # a line of the cluster's `setup:` failed
    "disk",
    "unknown",
]
"""Why an attempt ended. `unknown`: nobody said, and the run continues with a growing pause."""

Next = Literal["in_place", "requeue", "successor", "stop", "fail"]
"""What follows an attempt: ranks again on the nodes that the job has; the job again; another job; a person; nothing."""


def read(kind: type[R], file: Path) -> R | None:
    """Return the record in a file; None where there is none."""
    value = read_json(file, fresh=True)  # another host may have just made it
    if not isinstance(value, dict):
        return None
    try:
        return of(kind, value)
    except TypeError:  # a field that every record of the kind has is missing
        return None


def of(kind: type[R], value: Mapping[str, Any]) -> R:
    """Return the record in a JSON object. Raises TypeError where a field without a default is missing."""
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: item for key, item in value.items() if key in names})


def write(file: Path, record: Any, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file by a record. Raises OSError."""
    write_json(file, plain(record), durable=durable, mode=mode)


def plain(record: Any) -> dict[str, Any]:
    """Return a record as JSON values, without fields that are None."""
    return {key: value for key, value in dataclasses.asdict(record).items() if value is not None}


# What ranks leave


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the running attempt says it is, a few times a second at most: a view, never the truth."""

    attempt: int
    time: float
    """When it was written, in seconds since the epoch; so are all times in records."""
    step: int | None = None
    """Steps done; None before the loop."""
    first_step: int | None = None
    """The step that this attempt began with."""
    loop_began: float | None = None
    """When that step began."""
    total_steps: int | None = None
    steps_per_second: float | None = None
    rank_seconds: list[float] | None = None
    """Seconds a step that each rank works before it waits for the others (loop/own_time.py)."""
    values: dict[str, float | None] = field(default_factory=dict)
    """The newest logged values, the first few: for the progress bar and `list`. NaN is None."""
    evaluation: dict[str, int] | None = None
    """{done, total} in samples, during an evaluation."""
    outside_since: float | None = None
    """Since when rank 0 is outside of steps, as in a validation; None in a step."""
    peak_bytes: int | None = None
    """The most host memory that any rank has had resident."""
    repeats: dict[str, Any] | None = None
    """{repeated, compared, differs_at}: the steps that the attempt before had done already."""
    warnings: list[str] = field(default_factory=list)
    """What the ranks warn of, each once: the foreground command and `status` show it."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How and why a rank ended: its last act. A rank that is killed leaves none."""

    rank: int
    attempt: int
    kind: Literal["finished", "stopped", "failed"]
    time: float
    step: int | None = None
    """Steps done; for a failure the step it was in."""
    error: str | None = None
    """Type and message of the exception, in a line."""
    traceback: str | None = None
    nature: Nature | None = None
    signature: str | None = None
    """Type and innermost line of the user's code, as in `KeyError at train.py:41`."""
    samples: list[int] | None = None
    """Ids of this rank's samples in that step."""
    final: bool = False
    """True if any other attempt would end with this error too."""
    out_of_memory: str | None = None
    """`host`, `GPU` or another device whose memory was too small."""
    peak_bytes: int | None = None
    disk: bool = False
    """True if a full or read-only disk is the cause."""
    node: str | None = None
    seen: list[int] = field(default_factory=list)
    """Ranks whose RankReport lay there before this one was written: this error may only be their consequence."""
    result: dict[str, Any] | None = None
    """What the training function returned; rank 0's alone."""


# What `jobkit verify` leaves


InterruptionKind = Literal["stop", "memory", "disk", "evaluation", "epoch end"]
"""stop: between two steps; memory, disk: a kill one step after a snapshot or a checkpoint; the others: a stop there."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """An interruption of a verification's run."""

    attempt: int
    at: int
    """The boundary, in steps done."""
    kind: InterruptionKind


@dataclass(frozen=True, kw_only=True)
class Drill:
    """The orders for a run that `jobkit verify` starts: drill.json in the run directory."""

    steps: int
    """The loop ends after so many steps, as if that were its total."""
    shorten: int | None = None
    """Intervals of `every=` and passes over data are cut to so many steps."""
    interruptions: list[Interruption] = field(default_factory=list)

    def interruption(self, attempt: int) -> Interruption | None:
        return next((item for item in self.interruptions if item.attempt == attempt), None)


SeenKind = Literal["state", "generator", "tensor", "value"]
"""`state`: an object with a state_dict; `tensor`: arrays too; `value`: a number, a text, None or a long container."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A thing of a verification's program that a name leads to, and that is not tracked; at one boundary."""

    kind: SeenKind
    digest: str
    """Of a plain value its text, where that is short."""
    is_same: bool
    """True if it is the object that the boundary before had under this expression."""
    is_scalar: bool
    """True for tensors of one element: a loop may make them anew at each step, as a mean for its bar."""
    size: int
    """Elements of its tensors."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a person is told of an expression that leads to such a thing."""

    type: str
    way: Literal["track", "values", "attributes", "bit_generator", "own_state", "loader"]
    """How its state would be declared: the object itself, a value, attributes of its owner, the state of NumPy's
    generator, a state_dict that a person writes around it, or ctx.loader in place of an iterator."""
    owner: str
    """The expression that ctx.track, ctx.values or jobkit.attributes would take."""
    name: str
    """The variable, or the attribute, that is assigned."""
    file: str
    scope: str
    """The function that has the variable with which the expression begins; empty for a module's."""
    place: str
    """Where that variable is: `in main()`, `in train.py`."""
    holder: str = ""
    """The class of the object that has the attribute; empty for a variable."""
    keeper: str = ""
    """The expression of that object, where it has a state_dict of its own and is no module."""


# What commands leave


RequestKind = Literal["cancel", "preempt", "stop"]
"""cancel: save and end for good; preempt: as Slurm would; stop: save and end, the same command continues."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A person's request to a running attempt. A request of another submission or attempt is stale."""

    kind: RequestKind
    submission: int
    """Status.person_submission: of the jobs that follow each other by themselves, any may carry it out."""
    attempt: int
    """The newest attempt when it was asked; 0 before the first. Where that one had ended, none shall follow it."""
    grace: float | None = None
    """Seconds that the ranks get to save; 0 kills them at once; None is the default of the kind."""
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint of another run that a run begins with; written once it is in the run's own directory."""

    run: str
    path: str
    """The directory of that run, which may be gone by now."""
    step: int
    weights_only: bool = False
    """True: the weights of the models alone, and the run begins at step 0."""

    def begins(self, step: int) -> bool:
        """Return whether the run's own checkpoint of a step is the other run's."""
        return step == self.step and not self.weights_only


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """What the program seeded itself before the first step of the run; further attempts up to the first checkpoint use
    it again."""

    seeds: dict[str, int]
    """By `torch`, `NumPy` or `Python`: torch's seed, and for the others a number made of the state."""


# What a supervisor leaves


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to write, of one attempt and of one of its processes. It changes under the begin lock alone."""

    attempt: int
    """Ranks of other attempts publish nothing."""
    writer: str
    """A random word: the process with another word appends nothing to the journal."""
    token: str
    job_id: str
    restart: int = 0
    """Slurm's restart count of the job."""
    node: str | None = None
    """Slurm's name of the node with the batch script; None on this machine."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Contact:
    """How agents reach their supervisor: the file is for its owner alone, because of the secret."""

    addresses: list[str]
    port: int
    secret: str
    writer: str
    """The lease of the supervisor that listens."""


# Events of the journal


@dataclass(frozen=True, kw_only=True)
class Event:
    """An entry of the journal; `time` is when it was appended."""

    kind: ClassVar[str]
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    """A submission is about to be made. Nothing is written after sbatch answers: `AttemptBegan` has the job's id."""

    kind = "submitted"
    token: str
    """Names the submission in the job's comment; a job with an older token begins nothing."""
    number: int
    """Of the run's submissions, from 1."""
    scheduler: Literal["slurm", "local"]
    cluster: str | None = None
    """ClusterName@host:port of its Slurm; job ids are unique within it alone."""
    entry: str | None = None
    """The name under `clusters:`."""
    launcher: str | None = None
    """The program that started the ranks, as torchrun or python; None where jobkit starts them."""
    user: str = ""
    host: str = ""
    folder: str = ""
    """Where the command was typed, and where the job starts."""
    code: str | None = None
    """Digest of the code snapshot."""
    config: dict[str, Any] = field(default_factory=dict)
    """name, seed and params as written, for lists of runs."""
    by: Literal["person", "supervisor"] = "person"
    """A supervisor submits a successor where its job may not be requeued. The budgets of `retry:` start anew with a
    person's submission alone."""
    task: int | None = None
    """Which task of a job array this run is."""
    after: list[str] = field(default_factory=list)
    """Runs that must be finished before this one begins: names in the same folder, or paths."""


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """The scheduler did not take a submission."""

    kind = "refused"
    token: str
    error: str


@dataclass(frozen=True, kw_only=True)
class AttemptBegan(Event):
    """An attempt began: it holds the lease."""

    kind = "attempt began"
    attempt: int
    token: str
    job_id: str
    restart: int = 0
    how: Literal["start", "in place", "requeue", "resume"] = "start"
    """`resume`: a person has submitted the run again."""
    nodes: list[str] = field(default_factory=list)
    """Slurm's names of the nodes with ranks, in the order of the ranks; empty on this machine."""
    ranks: int = 1
    """0 where none was started: agents that did not come, or a reason to stop while the run waited."""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event):
    """An attempt ended: the cause, the lost steps, the decision."""

    kind = "attempt ended"
    attempt: int
    cause: Cause
    next: Next
    reason: str = ""
    """Why this is next, for a person."""
    error: str | None = None
    rank: int | None = None
    """The first rank to fail."""
    node: str | None = None
    """The node that is to blame, or on which that rank was."""
    step: int | None = None
    """The step that failed."""
    traceback: str | None = None
    samples: list[int] | None = None
    everywhere: bool = False
    """True if ranks of all nodes failed with this error."""
    alone: bool = False
    """True if ranks of `node` alone failed with this error."""
    final: bool = False
    nature: Nature | None = None
    signature: str | None = None
    """What makes two deaths alike: `KeyError at train.py:41`, `SIGSEGV of rank 3`, `hang`."""
    evidence: str | None = None
    """What speaks against `node`, as its device's own word."""
    tries: int = 0
    """Deaths since the run last made progress."""
    waited: float = 0.0
    """Seconds since then that the run has waited for better weather, with the pause that follows."""
    next_at: float | None = None
    """When the next attempt begins, at the earliest; None where nothing is to be waited for."""
    gives_up_at: float | None = None
    """When the run would be interrupted without progress until then (`retry.patience`)."""
    gave_up: bool = False
    """True if it was interrupted for that."""
    before_step: int | None = None
    """The next attempt begins with a state older than this step, to see whether the step fails again."""
    avoid: dict[str, float] = field(default_factory=dict)
    """The nodes that the run avoids from here on, each until a time."""
    first_step: int | None = None
    last_step: int | None = None
    """Steps done when it ended."""
    durable_step: int | None = None
    """The newest checkpoint on the disk when it ended."""
    snapshot_step: int | None = None
    """The newest snapshot in memory that all ranks had completed; of ranks of lost nodes nothing is known."""
    repeated: int | None = None
    compared: int | None = None
    """Steps that the attempt before had done, and how many of them logged values that could be compared."""
    differs_at: int | None = None
    """The first of them that logged other values."""
    loop_began: float | None = None
    last_seen: float | None = None
    """When its first step began, and when it last reported: `status` tells its start from its steps by them."""


@dataclass(frozen=True, kw_only=True)
class Requeued(Event):
    """The job is about to be put into the queue again; journalled first, because a requeue kills its own caller."""

    kind = "requeued"
    job_id: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Cancelled(Event):
    """A person ended the run; it continues when somebody submits it again."""

    kind = "cancelled"
    user: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Rewound(Event):
    """A person went back to a checkpoint; everything later is in `branch`."""

    kind = "rewound"
    step: int
    branch: str
    """Relative to the run directory."""
    moved: list[int] = field(default_factory=list)
    """Steps of the checkpoints in the branch."""
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The training function returned on all ranks."""

    kind = "finished"
    result: dict[str, Any] | None = None
    step: int | None = None


def new_token(run: str, number: int) -> str:
    """Return the token of a run's submission: it names this one, also where the run directory is copied or moved."""
    import secrets  # lists of runs need none

    return f"jobkit:{run}:{number}:{secrets.token_hex(3)}"


EVENTS: dict[str, type[Event]] = {event.kind: event for event in Event.__subclasses__()}
