"""`jobkit/start.py jobkit.worker.parent WHERE [MODULE ...]`: imports modules once and forks ranks that have them.

WHERE is one end of a Unix socket, or the run directory of the Slurm job in which srun has started this process on each
node. jobkit/supervisor/parents.py has the other end and says which processes to start; this one serves until that end
is closed. Four ranks reach their first step 0.13 s after such a fork, against 9 s with an import each. A fork copies
one thread and no state of a device: so a parent has one thread and touches no device. Where an import has broken that,
each rank is started as a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jobkit.log import configure
from jobkit.run.processes import began, children, lives, that_catch
from jobkit.run.rundir import RunDir
from jobkit.run.slots import last_step, make_slots
from jobkit.supervisor.channel import (
    Adopt,
    Adopted,
    Begins,
    Channel,
    Ended,
    Fork,
    Forked,
    Hello,
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
from jobkit.supervisor.listener import ADDRESS, connect, read_secret
from jobkit.supervisor.parents import send
from jobkit.worker import rescue
from jobkit.worker.forked import (
    become_rank,
    end,
    get_when_parent_ends,
    run_and_end,
    run_call,
    start_anew,
    take_output,
    take_place,
    take_slots,
)
from jobkit.worker.guard import Guard
from jobkit.worker.launcher import Topology
from jobkit.worker.out_of_memory import kernel_oom_kills
from jobkit.worker.preload import Trial, import_more, preload

IGNORED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""By a parent for ever, and by a rank until the worker takes them: before that nothing is there to save."""

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)
"""What Slurm sends to a step's tasks, which its parents are: with cgroups the ranks do not get it themselves."""

ENDS_BY = {code for one in PASSED_ON for code in (-one, 128 + one)}
"""How a program ends that has no handler for them, and a shell whose command has ended so."""

STOPPING_SECONDS = 0.05
"""How often to look whether those that a rank's first process waits for have stopped: the kernel does not tell us."""

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHONHASHSEED"),
    *("TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_CPP_"),
)
"""Beginnings of variables that libraries read when they are imported: a warm parent cannot change them afterwards."""

Call = Callable[[], None]
"""What a forked process is to run."""


class Parent:
    """Starts processes for one supervisor and reports how they end."""

    def __init__(self, channel: Channel, *, passes_on: Iterable[int] = (), problem: str | None = None) -> None:
        self._channel = channel
        self._is_local = not passes_on
        self._guard: Guard | None = None
        self._problem = problem
        """Why a fork would be no good: then each process is a new one."""
        self._listener: socket.socket | None = None
        self._wakeup, self._woken = socket.socketpair()
        self._wakeup.setblocking(False)
        self._woken.setblocking(False)
        self._ranks: dict[int, int] = {}
        """The key of each by its process id."""
        self._asked: dict[int, tuple[int, set[tuple[int, str]]]] = {}
        """By a rank's process id: the signal to stop, and which of its processes have got it as they have handlers."""
        self._outlived: dict[int, Ended] = {}
        """By its process id, the end of a rank which was told to stop, while others that it has started still do."""
        self._oom_kills: dict[int, int] = {}
        self._kills_strays = False
        self.is_dismissed = False
        """Whether its supervisor has ended in order."""
        self._slots: dict[str, tuple[int, int] | None] = {}
        """The memory that outlives the process which has it, by the name that the supervisor gives it."""
        self._trial: Trial | None = None
        self._left_out: dict[str, str] = {}
        self._differing = set(Topology().environment("", 0))
        """Environment variables that are others in a rank."""
        self.attempt: int | None = None
        """The newest that the supervisor has begun, where its processes belong to one."""
        self._slots_of_rank: dict[int, tuple[int, int] | None] = {}
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *passes_on):
            signal.signal(number, lambda number, frame: None)  # the byte in the socket is what wakes the loop
        _adopt_orphans()

    def serve(self) -> Call | Channel | None:
        """Do what the supervisor asks for until it is gone: None.

        Returns in each forked process, too: with the call of a rank, or with the connection of a new client. So the
        rank runs at the top of the program, and ends as any program does.
        """
        self._tell(Ready(cannot_fork=self._problem))
        while True:
            sources: list[Any] = [self._channel, self._wakeup, *([self._listener] if self._listener else [])]
            pause = STOPPING_SECONDS if self._asked or self._outlived else None
            readable = select.select(sources, [], [], 0 if self._channel.has_line else pause)[0]
            if not readable and pause is not None:
                self.reap()
            if self._wakeup in readable:
                self._take_signals()
                if self._trial is not None and self._trial.has_ended:
                    self._import_tried(self._trial)
            if self._listener in readable and (client := self._fork_parent()) is not None:
                return client
            if self._channel in readable or self._channel.has_line:
                try:
                    received = self._channel.arrived()
                except (EOFError, OSError):
                    return None  # there is nobody left to tell
                if received is not None and isinstance(received[0], Leave):
                    self.is_dismissed = True
                    return None
                if received is not None and (call := self._obey(*received)) is not None:
                    return call

    def _obey(self, message: Message, files: list[int]) -> Call | None:
        match message:
            case Listen():
                self._listener = socket.socket(fileno=files[0])
            case Fork():
                return self._fork(message, files)
            case Preload():
                self._try_imports(message.modules)
            case Begins():
                self.attempt = message.attempt
            case Signal(name="USR2"):
                self._give_notice([pid for pid, key in self._ranks.items() if key in message.keys])
            case Signal():
                self.signal_ranks(signal.Signals[f"SIG{message.name}"], message.keys)
                self.reap()  # there may be no rank left whose end would call for it
        return None

    def _fork(self, request: Fork, files: list[int]) -> Call | None:
        """Start one process: None here, the call in the process."""
        parent = os.getpid()
        try:
            if self._is_local and self._guard is None:
                self._guard = Guard()
            slots = self._slots_of(request)
            pid = os.fork()
        except OSError as error:
            self._tell(NotForked(key=request.key, error=str(error)))
            pid = -1
        if pid == 0:
            self.leave()  # first: the sockets' other ends must see the parent's death, and not wait for this rank's
            for name, kept in self._slots.items():
                for file in kept or () if name != request.slots else ():
                    os.close(file)  # of other ranks: it is to go when they and the parent are gone
            become_rank(request, files, parent)
            take_slots(slots)
            if self._problem is not None:
                start_anew(request)
            return lambda: run_call(request.target, request.arguments)
        for file in files:
            os.close(file)
        if pid > 0:
            self._ranks[pid] = request.key
            self._oom_kills[request.key] = kernel_oom_kills()
            self._kills_strays = False
            self._slots_of_rank[request.key] = slots
            self._differing.update(n for n, value in request.environment.items() if os.environ.get(n) != value)
            self._watch()
            self._tell(Forked(key=request.key, pid=pid))
        return None

    def _try_imports(self, modules: Sequence[str]) -> None:
        if self._problem is None and self._trial is None:
            with contextlib.suppress(OSError):  # it only saves time
                self._trial = Trial(modules, self._differing, self.leave)

    def _import_tried(self, trial: Trial) -> None:
        """Import what a trial has shown to do no harm; ranks that end meanwhile are reported between two imports."""
        self._trial = None
        reasons, harmful = trial.outcome()
        self._left_out.update(reasons)
        if harmful:  # what is left may import some of it, which did nothing any more when it was there already
            self._try_imports([name for name in trial.modules if name not in harmful])
        else:
            import_more(trial.modules, self._take_signals)
            self._tell(Preloaded(left_out=self._left_out))
            self._left_out = {}

    def _slots_of(self, request: Fork) -> tuple[int, int] | None:
        if request.slots and request.slots not in self._slots:
            self._slots[request.slots] = make_slots()
        return self._slots.get(request.slots)

    def _fork_parent(self) -> Channel | None:
        """Fork a parent for a new client: None in this one, the connection in the new one."""
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if os.fork() == 0:
            self.leave()
            os.setsid()
            return Channel(connection)
        connection.close()
        return None

    def _take_signals(self) -> None:
        """Pass on what Slurm has sent, and report every child that has ended; one signal may stand for several."""
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := self._wakeup.recv(4096):
                numbers.update(data)
        for number in numbers.intersection(PASSED_ON):
            self._tell(Told(signal=number))  # first: the supervisor is to know when it learns that they have ended
            self.signal_ranks(number)
        self.reap()

    def reap(self) -> bool:
        """Report the ranks that have ended; whether any rank is left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if self._trial is not None and pid == self._trial.pid:
                    self._trial.has_ended = True
                if pid in self._ranks:
                    self._note_end(pid, os.waitstatus_to_exitcode(status))
            if self._kills_strays and not self._ranks.keys() - self._outlived.keys():
                self._kill_others()
        self._go_on_stopping()
        return bool(self._ranks)

    def _note_end(self, pid: int, code: int) -> None:
        key = self._ranks[pid]
        oom = kernel_oom_kills() > self._oom_kills.pop(key)
        self._outlived[pid] = Ended(key=key, returncode=code, out_of_memory=oom)
        number, asked = self._asked.pop(pid, (abs(code) & 0x7F, set[tuple[int, str]]()))
        if code in ENDS_BY and not self._kills_strays:
            # A shell, or another program that has no handler, has ended at once. What it was to wait for, and what was
            # told nothing where it alone got the signal, is ours now.
            for one in that_catch(self._others(), number):
                if (one, began(one)) not in asked:
                    _kill(one, number)

    def _go_on_stopping(self) -> None:
        """Tell the rest of a rank when those that had asked for the signal are done, and report one that has ended when
        nothing is left that would save."""
        for pid, (number, asked) in list(self._asked.items()):
            if not any(lives(one) and began(one) == since for one, since in asked):
                del self._asked[pid]
                send(pid, number)  # else a shell would go on with its next line
        for pid, ended in list(self._outlived.items()):
            waits = ended.returncode in ENDS_BY and that_catch(self._others(), signal.SIGTERM)
            if not waits:
                del self._outlived[pid], self._ranks[pid]
                self._watch()
                self._tell(dataclasses.replace(ended, last_step=self._last_step_of(ended.key)))

    def _watch(self) -> None:
        if self._guard is not None:
            self._guard.watch(self._ranks)

    def _last_step_of(self, key: int) -> tuple[int, float] | None:
        return last_step(self._slots_of_rank.pop(key), self.attempt)

    def _kill_others(self) -> None:
        """Kill what ranks have left behind in sessions of its own: it would use the devices that the next ones need."""
        for pid in self._others():
            send(pid, signal.SIGKILL)

    def _others(self) -> list[int]:
        """What ranks that have ended have left behind."""
        own = {*self._ranks, *(one.pid for one in (self._trial, self._guard) if one is not None)}
        return [pid for pid in children(os.getpid()) if pid not in own]

    def signal_ranks(self, number: int, keys: Collection[int] | None = None) -> None:
        """Send ranks a signal: one to stop goes to those of their processes that have a handler for it, and to others
        when these have ended. A script's shell would only die of it, and torchrun take the ranks' store with it."""
        self._kills_strays = self._kills_strays or number == signal.SIGKILL
        for pid, key in self._ranks.items():
            if pid in self._outlived or not (keys is None or key in keys):
                continue
            if number not in PASSED_ON or not (asking := that_catch([pid], number)):
                send(pid, number)
                continue
            self._asked[pid] = number, {(one, began(one)) for one in asking}
            for one in asking:
                _kill(one, number)

    def _give_notice(self, ranks: Sequence[int]) -> None:
        """Send SIGUSR2 to what catches it of some ranks: the rest would die of it, and may be done in time."""
        if told := that_catch(ranks, signal.SIGUSR2):
            self._tell(Told(signal=signal.SIGUSR2))  # first, as where Slurm sends it
        for pid in told:
            _kill(pid, signal.SIGUSR2)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, as the next look will say
            self._channel.send(message)

    def leave(self) -> None:
        """Let go of what is the parent's: in a forked process, and at the end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for one in (self._channel, self._listener, self._wakeup, self._woken, self._guard):
            if one is not None:
                one.close()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _adopt_orphans() -> None:
    """Become the parent of what ranks leave behind (Linux), so that it can be ended."""
    PR_SET_CHILD_SUBREAPER = 36
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def adopt(client: Channel, settings: Mapping[str, str], problem: str | None) -> tuple[bool, str | None]:
    """Become the parent of a warm parent's client, where that can be: whether, and why its ranks may not be forked.

    `settings` are those of the imports.
    """
    received = client.receive()
    if received is None or not isinstance(wish := received[0], Adopt):
        return False, None
    take_output(received[1])
    fits = wish.executable == sys.executable and settings == _read_at_import(wish.environment)
    with contextlib.suppress(OSError):
        client.send(Adopted(accepted=fits))
    if fits:
        take_place(wish.environment, wish.cwd)
        problem = preload(wish.preload) or problem
    return fits, problem


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def main(arguments: list[str]) -> None:
    """Serve one supervisor; in a forked process, run what it was forked for."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    configure("stderr")
    where, *modules = arguments
    outcome = _serve_socket(int(where), modules) if where.isdigit() else _serve_job(RunDir(where))
    if outcome is None:
        end(0)
    run_and_end(outcome)


def _serve_socket(descriptor: int, modules: Sequence[str]) -> Call | None:
    """Serve a supervisor of this machine, and the clients it may want served."""
    get_when_parent_ends(signal.SIGKILL)  # an import that hangs never comes to see that the supervisor is gone
    settings = _read_at_import(os.environ)
    problem = preload(modules)
    parent = Parent(Channel(socket.socket(fileno=descriptor)), problem=problem)
    outcome = parent.serve()
    if isinstance(outcome, Channel):
        fits, problem = adopt(outcome, settings, problem)
        parent = Parent(outcome, problem=problem)
        outcome = parent.serve() if fits else None
    if outcome is None:
        parent.leave()  # its ranks get SIGTERM when it ends
    assert not isinstance(outcome, Channel)
    return outcome


def _serve_job(run: RunDir) -> Call | None:
    """Serve the supervisor of the Slurm job that this process is a task of, as the only one on its node."""
    hello = Hello(node=os.environ["SLURMD_NODENAME"], step=os.environ["SLURM_STEP_ID"])
    channel, welcome = connect(os.environ.pop(ADDRESS), read_secret(run.secret_file), hello)
    problem = preload(welcome.preload)
    parent = Parent(channel, passes_on=PASSED_ON, problem=problem)
    outcome = parent.serve()
    assert not isinstance(outcome, Channel)
    if outcome is None and not parent.is_dismissed:
        _outlive_supervisor(run, parent)
    if outcome is None:
        parent.leave()
    return outcome


def _outlive_supervisor(run: RunDir, parent: Parent) -> None:
    """Let the ranks save, and see to it that the job goes on."""
    until = time.monotonic() + rescue.SAVE_SECONDS
    if parent.attempt is not None:
        with contextlib.suppress(OSError):
            rescue.tell_ranks(run, parent.attempt)
        parent.signal_ranks(signal.SIGTERM)
        rescue.start_job_again(run, parent.attempt)  # while they save
    while parent.reap():
        if time.monotonic() > until or run.owner() not in (parent.attempt, None):
            parent.signal_ranks(signal.SIGKILL)
        time.sleep(0.1)
