"""Messages between a supervisor and the parents of its ranks: typed, as JSON, one a line, over a stream socket.

Over a network each line is signed with a key that both sides derive from a secret of the job, so that nobody else can
speak for either, repeat a line or leave one out.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import math
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from jobkit.run import records

MAX_FILES = 250
"""Linux sends at most 253 open files with one message (SCM_MAX_FD)."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a parent that was started by srun."""

    node: str
    """Slurm's name of its node."""
    step: str
    """The number of its job step."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """To a parent: its greeting was right."""

    preload: list[str]
    """Modules to import."""


@dataclass(frozen=True, kw_only=True)
class Begins:
    """To a parent: an attempt begins, with ranks here or not. It says for which one to act if the supervisor dies."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A parent's imports are done."""

    cannot_fork: str | None = None
    """Why each rank will be started as a new process, which imports everything again."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """To a parent: start a process, which is called `key` from here on."""

    key: int
    target: str
    """`module:function`, which the process calls."""
    arguments: list[Any]
    environment: dict[str, str]
    inherits: bool = False
    """Whether `environment` comes over the parent's own, instead of replacing it."""
    cwd: str | None = None
    """None for the parent's."""
    logs: list[str] = field(default_factory=list)
    """Files that its output and its errors are appended to; without them two open files come with the message."""
    slots: str = ""
    """Names the memory (run/slots.py) that the process is to have: what had that name before has left something in it.
    """
    place: list[int] = field(default_factory=list)
    """[local rank, local world size], where the parent is to divide its CPUs."""


@dataclass(frozen=True, kw_only=True)
class Forked:
    """Of a parent: the process runs."""

    key: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class NotForked:
    """Of a parent: the process could not be started."""

    key: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Of a parent: the process has ended."""

    key: int
    returncode: int
    """Its exit code, or the negative of the signal that killed it."""
    out_of_memory: bool = False
    """Whether the kernel has killed for lack of memory meanwhile."""
    last_step: tuple[int, float] | None = None
    """Steps done, and when the last one was, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of a parent: its processes are told to stop, by a signal of Slurm's to its step or by a notice."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class Signal:
    """To a parent: send its processes a signal, by its name without SIG; all but TERM reach what they have started, and
    USR2, a notice, only those of them that catch it."""

    keys: list[int]
    name: str


@dataclass(frozen=True, kw_only=True)
class Preload:
    """To a parent: import these modules, too, as far as that does not keep it from forking."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Preloaded:
    """Of a parent: it has; `left_out` says of each module that it has not imported why."""

    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """To a parent: it is not needed any more. Without this word its supervisor has died."""


@dataclass(frozen=True, kw_only=True)
class Listen:
    """To a parent: serve the clients of the socket that comes with the message, each by a parent of its own."""


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """To a parent that serves many: what a client needs."""

    executable: str
    environment: dict[str, str]
    preload: list[str]
    cwd: str


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """Its answer."""

    accepted: bool


FromParent = Hello | Ready | Forked | NotForked | Ended | Told | Preloaded | Adopted
ToParent = Welcome | Begins | Fork | Signal | Preload | Leave | Listen | Adopt
Message = FromParent | ToParent

KINDS = {one.__name__: one for one in get_args(Message)}


SIGNATURE_LENGTH = 64
"""Of a SHA-256 in hexadecimal digits."""


class Forged(OSError):
    """A line that the other side has not sent."""


class Channel:
    """One end of a connection. `key` signs each line; without one the socket is between two processes of a machine."""

    def __init__(self, connection: socket.socket, key: bytes = b"", *, is_listener: bool = False) -> None:
        self._socket = connection
        self._key = key
        self._sends, self._reads = (b"L", b"C") if is_listener else (b"C", b"L")
        self._sent = self._read = 0
        self._data = b""
        self._files: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send one message, with open files where the socket is a Unix one; raises OSError when nobody is there."""
        content = {"kind": type(message).__name__, "files": len(files), **dataclasses.asdict(message)}
        text = json.dumps(content).encode()
        data = self._signature(self._sends, self._sent, text) + text + b"\n"
        self._sent += 1
        sent = socket.send_fds(self._socket, [data], files) if files else 0
        self._socket.sendall(data[sent:])  # a large environment does not fit into the socket's buffer at once

    def receive(self, longest: float = math.inf) -> tuple[Message, list[int]] | None:
        """Wait for one message, of at most so many bytes, and its files; None when the other side is gone."""
        while not self.has_line:
            if not self._fill():
                return None
            if len(self._data) > longest:
                raise Forged("a message that is longer than any of this kind")
        return self._next()

    def arrived(self) -> tuple[Message, list[int]] | None:
        """A message that is there without waiting for it; None where none is. Raises EOFError with the other side."""
        while not self.has_line:
            if not select.select([self._socket], [], [], 0)[0]:
                return None
            if not self._fill():
                raise EOFError
        return self._next()

    @property
    def has_line(self) -> bool:
        """Whether a message has been read from the socket that nobody has received yet."""
        return b"\n" in self._data

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> bool:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionError, TimeoutError):  # silent for so long that the system has given it up
            return False
        self._data += data
        self._files += files
        return bool(data)

    def _next(self) -> tuple[Message, list[int]]:
        line, _, self._data = self._data.partition(b"\n")
        signature, text = (line[:SIGNATURE_LENGTH], line[SIGNATURE_LENGTH:]) if self._key else (b"", line)
        if not hmac.compare_digest(signature, self._signature(self._reads, self._read, text)):
            raise Forged("a line on a connection between supervisor and ranks is not signed with the job's secret")
        self._read += 1
        content: dict[str, Any] = json.loads(text)
        files, self._files = self._files[: content["files"]], self._files[content["files"] :]
        message: Message = records.of(KINDS[content["kind"]], content)
        return message, files

    def _signature(self, direction: bytes, number: int, text: bytes) -> bytes:
        if not self._key:
            return b""
        return hmac.digest(self._key, b"%s %d %s" % (direction, number, text), "sha256").hex().encode()
