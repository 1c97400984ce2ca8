"""The supervisor's side of worker/parent.py: a process that has imported torch and forks ranks. No torch here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit import start
from jobkit.errors import JobkitError
from jobkit.log import log
from jobkit.run.processes import in_sessions
from jobkit.supervisor.channel import (
    Adopt,
    Adopted,
    Begins,
    Channel,
    Ended,
    Fork,
    Forked,
    Leave,
    Listen,
    Message,
    NotForked,
    Preload,
    Preloaded,
    Ready,
    Signal,
    Told,
)

WARM_PARENT = "JOBKIT_WARM_PARENT"
"""Environment variable with the path of a Unix socket; a parent that has imported torch for all of us listens there."""

PARENT = "JOBKIT_PARENT"
"""Environment variable of a rank with the process id of its parent: with another one, it has died."""

TASK_MODULES = ("torch", "torch._dynamo", "submitit.core.submission", "jobkit.run.compiler_cache", "jobkit.worker.task")
"""What a rank imports before the user's code. The first step of an optimizer imports torch._dynamo: 3 s of 4."""

ANSWER_SECONDS = 60.0
"""How long a parent may take to fork: on a busy machine that copies the page tables of torch."""


CLOSE_SECONDS = 10.0
"""How long a parent that is not needed any more may take to end."""


class ParentError(JobkitError):
    """A parent of ranks is gone, could not be started or could not fork; its standard error says why."""


@dataclass
class Child:
    """A process that a parent has started."""

    key: int
    pid: int | None = None
    returncode: int | None = None
    """Its exit code, or the negative of the signal that killed it; None while it runs."""
    out_of_memory: bool = False
    """Whether the kernel has killed for lack of memory when it ended."""
    problem: str | None = None
    """Why it was not started."""
    last_step: tuple[int, float] | None = None
    """When it has ended: how many steps it had done, and when the last one was, in seconds since the epoch."""


class Parent:
    """One parent and the processes that it has forked for us. `node` is Slurm's name of its node."""

    def __init__(
        self, channel: Channel, process: subprocess.Popen[bytes] | None = None, node: str | None = None
    ) -> None:
        self._channel = channel
        self.process = process
        """None where somebody else has started it, as srun or a warm parent."""
        self.node = node
        self.has_imported = False
        """Whether it has said that its imports are done."""
        self.is_gone = False
        """Whether it has been found dead: its processes have been sent SIGTERM then."""
        self.is_given_up = False
        self.told: int | None = None
        """The last signal that Slurm has sent its processes in this attempt."""
        self.told_at = 0.0
        """When, by the monotonic clock."""
        self._children: dict[int, Child] = {}
        self._preloaded: set[str] = set()

    @classmethod
    def start(cls, environment: Mapping[str, str], preload: Sequence[str] = ()) -> Parent:
        """A parent on this machine with this environment that imports these modules; returns at once.

        Where the environment names a warm one (JOBKIT_WARM_PARENT), that one forks it, unless it runs another Python
        or has imported its libraries under other settings.
        """
        if (warm := environment.get(WARM_PARENT)) and (channel := _ask_warm_parent(warm, environment, preload)):
            return cls(channel)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                start.words("jobkit.worker.parent", str(theirs.fileno()), *preload),
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the command that follows the run
            )
        return cls(Channel(ours), process)

    def fileno(self) -> int:
        """Of the connection, which can be read when something has happened."""
        return self._channel.fileno()

    @property
    def is_warm(self) -> bool:
        """Whether it was forked by another parent."""
        return self.process is None and self.node is None

    @property
    def has_news(self) -> bool:
        """Whether something has arrived and been read, but not been taken note of."""
        return self._channel.has_line

    # Processes

    def fork(self, call: tuple[str, list[Any]], files: Sequence[int] = (), **options: Any) -> Child:
        """Start a process that runs `module:function` with arguments that JSON can express, and ends as a program does.

        It has a session of its own, ignores SIGTERM, SIGUSR2 and SIGINT until it installs handlers, and gets SIGTERM
        when its parent dies. `files` are open files that it gets under other numbers, the first two for its output
        unless `logs` names files; `options` are those of channel.Fork. Raises ParentError.
        """
        child = self.begin_fork(call, files, **options)
        self.finish_fork(child)
        return child

    def begin_fork(self, call: tuple[str, list[Any]], files: Sequence[int] = (), **options: Any) -> Child:
        """`fork`, but without waiting for the answer: `finish_fork` does."""
        child = Child(len(self._children))
        self._children[child.key] = child
        target, arguments = call
        try:
            self._channel.send(Fork(key=child.key, target=target, arguments=arguments, **options), files)
        except OSError as error:
            raise self.lost() from error
        return child

    def finish_fork(self, child: Child) -> None:
        """Wait until a process runs. Raises ParentError."""
        until = time.monotonic() + ANSWER_SECONDS
        while child.pid is None and child.problem is None:
            if self.is_gone:
                raise self.lost()
            if time.monotonic() > until:
                raise ParentError(f"{self._name} has not started a rank in {ANSWER_SECONDS:g} s")
            wait_for_any([self], 1.0)
            self.update()  # last: what it has read is not waited for
        if child.problem is not None:
            raise ParentError(f"no process could be started: {child.problem}")

    def update(self) -> None:
        """Take note of what has arrived."""
        try:
            while not self.is_gone and (received := self._channel.arrived()) is not None:
                self._note(received[0])
        except (EOFError, OSError) as error:
            if isinstance(error, OSError):
                log.warning("%s: %s", self._name, error)
            self.is_gone = True
        for child in self._children.values() if self.is_gone else ():
            # Nobody knows how it ended. Slurm kills what is left of the step on its node.
            has_ended = self.node is not None or child.pid is None or not in_sessions({child.pid})
            if child.returncode is None and has_ended:
                child.returncode = -signal.SIGKILL

    def _note(self, message: Message) -> None:
        match message:
            case Ready():
                self.has_imported = True
                if message.cannot_fork:
                    log.warning("ranks start as new processes, which takes longer: %s", message.cannot_fork)
            case Preloaded():
                for reason in dict.fromkeys(message.left_out.values()):
                    modules = [name for name, why in message.left_out.items() if why == reason]
                    log.info("%s imports only in each rank, because %s: %s", self._name, reason, shortened(modules))
            case Forked():
                self._children[message.key].pid = message.pid
            case NotForked():
                self._children[message.key].problem = message.error
            case Told():
                self.told, self.told_at = message.signal, time.monotonic()
            case Ended():
                child = self._children[message.key]
                child.returncode, child.out_of_memory = message.returncode, message.out_of_memory
                child.last_step = message.last_step and (message.last_step[0], message.last_step[1])

    def poll(self, child: Child) -> int | None:
        """As subprocess's `poll`."""
        self.update()
        return child.returncode

    def signal(self, name: str, children: Sequence[Child]) -> None:
        """Send a signal to processes that have not ended; all but TERM reach what they have started, too. TERM reaches
        whoever has a handler for it, and USR2 nobody else.

        After KILL nothing is left of those that have ended, either, once all have.
        """
        keys = [child.key for child in children if child.returncode is None]
        if not keys and name != "KILL":
            return
        with contextlib.suppress(OSError):  # it is gone: its processes have SIGTERM
            self._channel.send(Signal(keys=keys, name=name))
            return
        if self.node is None:
            for child in children:
                if child.pid is not None and in_sessions({child.pid}):
                    send(child.pid, signal.Signals[f"SIG{name}"])

    # The parent itself

    def begin_attempt(self, number: int) -> None:
        """Tell it of the attempt that begins."""
        self.told = None
        with contextlib.suppress(OSError):  # it is gone
            self._channel.send(Begins(attempt=number))

    def preload(self, modules: Sequence[str]) -> None:
        """Make it import more modules, beside the ranks that run, as far as that does not keep it from forking."""
        if new := [name for name in modules if name not in self._preloaded]:
            self._preloaded.update(new)
            with contextlib.suppress(OSError):  # it is gone
                self._channel.send(Preload(modules=new))

    def is_ready(self) -> bool:
        """Whether its imports are done, and `fork` is answered at once. Raises ParentError where it has ended."""
        self.update()
        if self.is_gone:
            raise self.lost()
        return self.has_imported

    def listen(self, path: str | os.PathLike[str]) -> None:
        """Make it fork a parent of its own for each client of this socket: it is a warm one then.

        The path is there when this returns; who connects before the imports are done waits for them.
        """
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            listener.listen(64)  # clients that may wait for the imports
            self._channel.send(Listen(), [listener.fileno()])

    def close(self) -> None:
        """End it; a process of its own that is still there gets SIGTERM."""
        if not self.is_gone:
            with contextlib.suppress(OSError):
                self._channel.send(Leave())
        self._channel.close()
        self.is_gone = True
        if self.process is not None:
            try:
                self.process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:  # it is stopped
                self.process.kill()
                self.process.wait()

    def give_up(self) -> None:
        """Leave it, and processes that do not end, to themselves."""
        log.warning("%s: its ranks do not end", self._name)
        self.is_given_up = True
        with contextlib.suppress(OSError):
            self._channel.send(Leave())  # else it would take its supervisor for dead
        self._channel.close()
        self.is_gone = True
        if self.process is not None:
            self.process.kill()  # it may be stopped
        for child in self._children.values():
            child.returncode = -signal.SIGKILL if child.returncode is None else child.returncode

    def kill(self) -> None:
        """End one that may never be done with its imports."""
        if self.process is not None:
            self.process.kill()
        self.close()

    def lost(self) -> ParentError:
        """What to raise where it has gone."""
        self.is_gone = True
        code = f" with exit code {self.process.wait()}" if self.process is not None else ""
        return ParentError(f"{self._name} ended{code}; its standard error says why")

    @property
    def _name(self) -> str:
        return "the process that forks the ranks" + (f" on {self.node}" if self.node else "")


def wait_for_any(parents: Sequence[Parent], seconds: float) -> None:
    """Return when something has arrived from one of them, or after so many seconds."""
    connected = [one for one in parents if not one.is_gone]
    if any(one.has_news for one in connected):
        return
    select.select(connected, [], [], seconds)


def shortened(names: Sequence[str], shown: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _ask_warm_parent(path: str, environment: Mapping[str, str], preload: Sequence[str]) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # it ended: not a reason to fail
        connection.close()
        return None
    channel = Channel(connection)
    with contextlib.suppress(OSError):
        wish = Adopt(
            executable=sys.executable, environment=dict(environment), preload=list(preload), cwd=str(Path.cwd())
        )
        channel.send(wish, [1, 2])
        answer = channel.receive()
        if answer is not None and isinstance(answer[0], Adopted) and answer[0].accepted:
            return channel
    channel.close()
    return None


def send(pid: int, number: int) -> None:
    """Send a signal to a process of a session of its own and, but for SIGTERM, to what it has started."""
    ways = (os.kill,) if number == signal.SIGTERM else (os.killpg, os.kill)  # it may not have a group of its own yet
    for way in ways:
        with contextlib.suppress(ProcessLookupError):
            way(pid, number)
            return
