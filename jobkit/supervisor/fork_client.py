"""The supervisor's side of worker/fork_server.py, a process that has imported torch and forks ranks. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.errors import JobkitError

WARM_SERVER = "JOBKIT_FORK_SERVER"
"""Environment variable with the path of a Unix socket; a server that has imported torch for all of us listens there."""

PARENT = "JOBKIT_PARENT"
"""Environment variable of a rank with the process id of its server: with another parent, its server has died."""

TASK_MODULES = ("torch", "torch._dynamo", "submitit.core.submission", "jobkit.run.compiler_cache", "jobkit.worker.task")
"""What a rank imports before the user's code. The first step of an optimizer imports torch._dynamo: 3 s of 4."""

MAX_FILES = 250
"""Linux sends at most 253 open files with one message (SCM_MAX_FD)."""


class ForkServerError(JobkitError):
    """The process that forks ranks is gone or could not fork; its standard error says why."""


class Channel:
    """JSON messages, one a line, with open files beside them, over a Unix stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = b""
        self._files: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send one message; raises OSError when the other side is gone."""
        data = json.dumps({**message, "files": len(files)}).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], files) if files else 0
        self._socket.sendall(data[sent:])  # a large environment does not fit into the socket's buffer at once

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for one message and its files; None when the other side is gone."""
        while b"\n" not in self._data:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
            except ConnectionError:
                return None
            if not data:
                return None
            self._data += data
            self._files += files
        line, _, self._data = self._data.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        count = message["files"]
        files, self._files = self._files[:count], self._files[count:]
        return message, files

    def is_readable(self) -> bool:
        return b"\n" in self._data or bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._socket.close()


class ForkClient:
    """One server process and the ranks that it has forked for us."""

    def __init__(self, channel: Channel, server: subprocess.Popen[bytes] | None) -> None:
        self._channel = channel
        self._server = server
        """None where a warm server has forked it: then that one is its parent."""
        self.is_warm = server is None
        """Whether it had imported what ranks need before it was asked."""
        self.has_imported = False
        """Whether it has said that its imports are done."""
        self._returncodes: dict[int, int] = {}
        self.is_gone = False
        """Whether the server has been found dead: its ranks have been sent SIGTERM then."""

    @classmethod
    def start(cls, environment: Mapping[str, str], preload: Sequence[str] = ()) -> ForkClient:
        """A server with this environment that imports these modules; returns at once, the first `fork` waits for it.

        Where the environment names a warm server (JOBKIT_FORK_SERVER), that one forks it, unless it runs another
        Python or has imported its libraries under other settings.
        """
        if (warm := environment.get(WARM_SERVER)) and (channel := _ask_warm_server(warm, environment, preload)):
            return cls(channel, None)
        ours, theirs = socket.socketpair()
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-u", "-m", "jobkit.worker.fork_server", str(theirs.fileno()), *preload],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the command that follows the run
            )
        return cls(Channel(ours), server)

    def fork(
        self,
        call: tuple[str, list[Any]],
        *,
        environment: Mapping[str, str],
        cwd: str | os.PathLike[str],
        stdout: int,
        stderr: int,
        files: Sequence[int] = (),
    ) -> int:
        """Start a process that runs a function and ends with its exit code, as a program does; its process id.

        The process has a session of its own, ignores SIGTERM, SIGUSR2 and SIGINT until it installs handlers, and gets
        SIGTERM when its server dies.

        Args:
            call: `module:function` and its arguments, which JSON can express.
            environment: all of the process's environment; JOBKIT_PARENT is added.
            stdout: an open file, as are `stderr` and `files`, which stay open in the process under other numbers.

        Raises ForkServerError.
        """
        target, arguments = call
        request = {"target": target, "arguments": arguments, "environment": dict(environment), "cwd": os.fspath(cwd)}
        try:
            self._channel.send({"fork": request}, [stdout, stderr, *files])
        except OSError as error:
            raise self._lost() from error
        answer = self._answer()
        if "failed" in answer:
            raise ForkServerError(f"no process could be started: {answer['failed']}")
        return int(answer["forked"])

    def is_ready(self) -> bool:
        """Whether its imports are done, and `fork` is answered at once. Raises ForkServerError where it has ended."""
        while not (self.has_imported or self.is_gone) and self._channel.is_readable():
            self._receive()
        if self.is_gone:
            raise self._lost()
        return self.has_imported

    def poll(self, pid: int) -> int | None:
        """As subprocess's `poll`; -9 for a process that is gone with its server, as nobody knows its exit code then."""
        while not self.is_gone and self._channel.is_readable():
            self._receive()
        if self.is_gone and pid not in self._returncodes and not lives(pid):
            self._returncodes[pid] = -signal.SIGKILL
        return self._returncodes.get(pid)

    def listen(self, path: str | os.PathLike[str]) -> None:
        """Make the server fork one of its own for each client of this socket: a warm one.

        The path is there when this returns; who connects before the imports are done waits for them.
        """
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            listener.listen(64)  # clients that may wait for the imports
            self._channel.send({"listen": True}, [listener.fileno()])

    def close(self) -> None:
        """End the server; a rank that is still there gets SIGTERM."""
        self._channel.close()
        self.is_gone = True
        if self._server is not None:
            self._server.wait()

    def kill(self) -> None:
        """End a server that may never be done with its imports."""
        if self._server is not None:
            self._server.kill()
        self.close()

    def _answer(self) -> dict[str, Any]:
        """The answer to a request; ends of ranks may be reported before it."""
        while not self.is_gone:
            if (message := self._receive()) is not None:
                return message
        raise self._lost()

    def _receive(self) -> dict[str, Any] | None:
        """Wait for one message and return an answer; None where it was about the imports, or somebody's end."""
        received = self._channel.receive()
        self.is_gone = received is None
        if received is None:
            return None
        message, _ = received
        if "ready" in message:
            self.has_imported = True
            return None
        if "ended" not in message:
            return message
        self._returncodes[message["ended"]] = message["returncode"]
        return None

    def _lost(self) -> ForkServerError:
        self.is_gone = True
        code = f" with exit code {self._server.wait()}" if self._server is not None else ""
        return ForkServerError(f"the process that forks the ranks ended{code}; its standard error says why")


def _ask_warm_server(path: str, environment: Mapping[str, str], preload: Sequence[str]) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # it ended: not a reason to fail
        connection.close()
        return None
    channel = Channel(connection)
    request = {"executable": sys.executable, "environment": dict(environment), "preload": list(preload)}
    with contextlib.suppress(OSError):
        channel.send({**request, "cwd": str(Path.cwd())}, [1, 2])
        answer = channel.receive()
        if answer is not None and answer[0]["accepted"]:
            return channel
    channel.close()
    return None


def lives(pid: int) -> bool:
    """Whether a process that is not our child runs; one that nobody has waited for yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] not in "ZX"
