"""The messages between a supervisor and its agents: JSON lines over TCP, one secret compared once.

    supervisor                                  agent (one a node)
               <--- Hello(secret, node, ...)    connects; again, after the supervisor was killed and started anew
      Welcome ---->
               <--- NotReady(why)               before each import; each second while it looks for free devices
               <--- Ready(port)                 imports are done, or the last ranks and all they started are gone
      StartRanks(attempt, ranks) ---->         forks the ranks
               <--- RankExited(rank, code), Signalled(signal), Silent(rank)
      Ack(serial) ---->                         a message without Ack is said again after a new Hello
      Signal(name, ranks) ---->
      Leave ---->                               ends the agent

Locally the agent talks to 127.0.0.1; there is one agent, which simulates all nodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobkit.run import records

LOCAL = "local"
"""The node's name on this machine."""

SignalName = Literal["STOP", "KILL", "STACKS"]
"""STOP: the stop flag, and SIGTERM to processes that handle it. STACKS: every rank writes its stacks to its log."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank is."""

    rank: int
    local_rank: int
    local_world_size: int
    node: int
    """Index of its node, from 0."""


# Agent to supervisor


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first line of a connection."""

    secret: str
    node: str
    """Slurm's name of the node, or LOCAL."""
    job_id: str
    restart: int = 0
    """Slurm's restart count; an agent of an earlier start of the job is turned away."""
    step: str | None = None
    """Id of the Slurm step that started it."""
    process: str = ""
    """A random word for the process: in containers all agents may have the same pid."""
    attempt: int | None = None
    """The attempt whose ranks it has, if any are alive or not yet reported."""
    alive: list[int] = field(default_factory=list)
    """Ranks of that attempt that run."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The agent can start ranks. `port` is free for the rendezvous of the next attempt, if rank 0 is here."""

    port: int


@dataclass(frozen=True, kw_only=True)
class NotReady:
    """The agent lives and cannot start ranks yet: `why` is its occupation, as in `it imports sklearn`."""

    why: str


@dataclass(frozen=True, kw_only=True)
class RankExited:
    """A rank ended."""

    serial: int
    attempt: int
    rank: int
    code: int
    """Its exit code, or the negative of the signal that killed it."""
    out_of_memory: bool = False
    """True if the kernel killed for lack of memory on this node while the rank ended."""
    step: int = -1
    """Steps it had done, by its page; -1 if it never said."""
    snapshot_step: int | None = None
    """Its newest complete snapshot of this attempt."""
    in_step: bool = False
    """True if it was in a step, by its page, and had not recorded its end: something called exit."""
    device: str = ""
    """The NVIDIA devices of the node's ranks that are not well, by the driver, as `cuda:3 on node7: 2 uncorrected ECC
    errors, row remap pending`. It and the next two fields come with the node's first failure of an attempt."""
    device_is_sick: bool = False
    """True if one of them is lost, or its health has changed since the ranks started."""
    device_memory: str = ""
    """Processes of other jobs that have memory of these devices, as `cuda:3 on node7: process 4711 of alice has 12.3
    GiB`; for an error that is about memory."""

    @property
    def is_done(self) -> bool:
        """Whether it ended with 0, and not in the middle of a step."""
        return self.code == 0 and not self.in_step


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """Slurm, or a person, sent the agent a signal: it asked its ranks to stop already."""

    serial: int
    attempt: int | None
    signal: str
    """TERM or USR2."""


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A rank gave no sign of life for longer than StartRanks allowed; said again as long as that lasts."""

    attempt: int
    rank: int
    seconds: float
    step: int
    in_step: bool = True
    """False outside of steps, as in a validation."""


@dataclass(frozen=True, kw_only=True)
class NotStarted:
    """A rank could not be forked; nothing of the attempt runs on this node."""

    attempt: int
    error: str


# Supervisor to agent


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The secret was right; the agent belongs to this supervisor."""


@dataclass(frozen=True, kw_only=True)
class StartRanks:
    """Fork the ranks of an attempt."""

    attempt: int
    ranks: list[RankPlace]
    """The ranks of this node; on this machine all ranks."""
    world_size: int
    nodes: int
    master_addr: str
    master_port: int
    time_left: float | None = None
    """Seconds until the job's time limit: an agent without a supervisor stops its ranks in time by itself."""
    salvage: bool = False
    """True for ranks that only write the newest snapshot in the agents' memory to the disk (worker/salvage.py)."""


@dataclass(frozen=True, kw_only=True)
class Ack:
    serial: int


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Pass a signal on to the node's ranks of an attempt."""

    attempt: int
    name: SignalName
    unless_saving: bool = False
    """True spares ranks whose page says SAVING: half of the margin is over, and these have used it well."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """End: kill the ranks that are left, and exit."""


Message = (
    Hello
    | NotReady
    | Ready
    | RankExited
    | Signalled
    | Silent
    | NotStarted
    | Welcome
    | StartRanks
    | Ack
    | Signal
    | Leave
)

KINDS: dict[str, type[Any]] = {
    "Hello": Hello,
    "NotReady": NotReady,
    "Ready": Ready,
    "Exited": RankExited,
    "Signalled": Signalled,
    "Silent": Silent,
    "NotStarted": NotStarted,
    "Welcome": Welcome,
    "Start": StartRanks,
    "Ack": Ack,
    "Signal": Signal,
    "Leave": Leave,
}
"""The names in the lines: they stay, for an agent may be older than the supervisor that it meets again."""

_NAMES = {kind: name for name, kind in KINDS.items()}


def encode(message: Message) -> bytes:
    """Return a message as one line."""
    return json.dumps({"kind": _NAMES[type(message)], **dataclasses.asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises ValueError for anything else."""
    try:
        value: Mapping[str, Any] = json.loads(line)
        message: Message = records.of(KINDS[value["kind"]], value)
        if isinstance(message, StartRanks):
            places = [records.of(RankPlace, place) for place in value["ranks"]]
            message = dataclasses.replace(message, ranks=places)
        return message
    except Exception as error:  # anybody on the network may send anything
        raise ValueError(f"no message of jobkit's: {line[:200]!r}") from error


class Lines:
    """Splits the bytes of a connection into messages; a message may arrive in several pieces.

    lines = Lines()
    for message in lines.feed(connection.recv(65536)): ...
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with this piece. Raises ValueError."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in complete if line]
