"""`python -u -m jobkit.worker.parent WHERE [MODULE ...]`: imports modules once and forks ranks that have them.

WHERE is one end of a Unix socket, or the run directory of the Slurm job in which srun has started this process on each
node. jobkit/supervisor/parents.py has the other end and says which processes to start; this one serves until that end
is closed. Four ranks reach their first step 0.13 s after such a fork, against 9 s with an import each. A fork copies
one thread and no state of a device: so a parent has one thread and touches no device. Where an import has broken that,
each rank is started as a new process (`... call MODULE:FUNCTION ARGUMENTS`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jobkit.log import configure
from jobkit.run.rundir import RunDir
from jobkit.run.slots import SLOTS, environment_of, make_slots
from jobkit.supervisor.channel import (
    Adopt,
    Adopted,
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
)
from jobkit.supervisor.listener import ADDRESS, connect, read_secret
from jobkit.supervisor.parents import PARENT, send
from jobkit.worker import rescue
from jobkit.worker.cpus import take_share
from jobkit.worker.out_of_memory import kernel_oom_kills

IGNORED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""By a parent for ever, and by a rank until the worker takes them: before that nothing is there to save."""

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)
"""What Slurm sends to a step's tasks, which its parents are: with cgroups the ranks do not get it themselves."""

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHONHASHSEED"),
    *("TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_CPP_"),
)
"""Beginnings of variables that libraries read when they are imported: a warm parent cannot change them afterwards."""

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci")
"""What a process has open that has touched a device."""

DIES_FIRST = 300
"""A rank's oom_score_adj: where memory is short the kernel is to kill it, and not the parent that starts it again."""

VISIBLE_SECONDS = 60.0
"""How long a folder that another host has made may be invisible on NFS."""

Call = Callable[[], None]
"""What a forked process is to run."""


class Parent:
    """Starts processes for one supervisor and reports how they end."""

    def __init__(self, channel: Channel, *, passes_on: Iterable[int] = (), problem: str | None = None) -> None:
        self._channel = channel
        self._problem = problem
        """Why a fork would be no good: then each process is a new one."""
        self._listener: socket.socket | None = None
        self._wakeup, self._woken = socket.socketpair()
        for end in (self._wakeup, self._woken):
            end.setblocking(False)
        self._ranks: dict[int, int] = {}
        """The key of each by its process id."""
        self._oom_kills: dict[int, int] = {}
        self._kills_strays = False
        self.is_dismissed = False
        """Whether its supervisor has ended in order."""
        self._slots: dict[str, tuple[int, int] | None] = {}
        """The memory that outlives the process which has it, by the name that the supervisor gives it."""
        self._trial: tuple[int, list[str]] | None = None
        """A pipe from a process that tries some imports, and their modules."""
        self.attempt: int | None = None
        """That of the processes started last, where they belong to one."""
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
            sources += [self._trial[0]] if self._trial else []
            readable = sources if self._channel.has_line else select.select(sources, [], [])[0]
            if self._wakeup in readable:
                self._take_signals()
            if self._trial and self._trial[0] in readable:
                self._preload_tried()
            if self._listener in readable and (client := self._fork_parent()) is not None:
                return client
            if self._channel in readable:
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
            case Signal():
                self._kills_strays = message.name == "KILL"
                for pid, key in self._ranks.items():
                    if key in message.keys:
                        send(pid, signal.Signals[f"SIG{message.name}"])
        return None

    def _fork(self, request: Fork, files: list[int]) -> Call | None:
        """Start one process: None here, the call in the process."""
        parent = os.getpid()
        try:
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
            _become_rank(request, files, parent)
            _take_slots(slots)
            if self._problem is not None:
                _start_anew(request)
            return lambda: run_call(request.target, request.arguments)
        for file in files:
            os.close(file)
        if pid > 0:
            self._ranks[pid] = request.key
            self._oom_kills[request.key] = kernel_oom_kills()
            self._kills_strays = False
            self.attempt = int(request.environment.get("JOBKIT_ATTEMPT", 0)) or None
            self._tell(Forked(key=request.key, pid=pid))
        return None

    def _try_imports(self, modules: list[str]) -> None:
        """Import modules in a process of their own: one that starts a thread here could not be undone."""
        if self._problem is not None or self._trial is not None:
            return
        ours, theirs = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            return
        if pid == 0:
            self.leave()
            os.write(theirs, json.dumps(find_harmful(modules)).encode())
            os._exit(0)
        os.close(theirs)
        self._trial = ours, modules

    def _preload_tried(self) -> None:
        """Import what has done no harm in the trial; ranks that end meanwhile are reported between two imports."""
        assert self._trial is not None
        (pipe, modules), self._trial = self._trial, None
        with os.fdopen(pipe, "rb") as told:
            data = told.read()
        left_out: dict[str, str] = json.loads(data) if data else dict.fromkeys(modules, "its import ended the process")
        gc.disable()
        for name in modules:
            if name not in left_out and name not in sys.modules:
                with contextlib.suppress(Exception):  # it is imported again where it is needed, and told there
                    importlib.import_module(name)
                self._take_signals()
        gc.freeze()
        gc.enable()
        self._tell(Preloaded(left_out=left_out))

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
            self.signal_ranks(number)
        self.reap()

    def reap(self) -> bool:
        """Report the children that have ended; whether any rank is left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                key = self._ranks.pop(pid, None)
                if key is not None:
                    oom = kernel_oom_kills() > self._oom_kills.pop(key)
                    self._tell(Ended(key=key, returncode=os.waitstatus_to_exitcode(status), out_of_memory=oom))
            if self._kills_strays and not self._ranks:
                _kill_strays()  # they would use the devices that the next attempt's ranks need
        return bool(self._ranks)

    def signal_ranks(self, number: int) -> None:
        for pid in self._ranks:
            send(pid, number)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, as the next look will say
            self._channel.send(message)

    def leave(self) -> None:
        """Let go of what is the parent's: in a forked process, and at the end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for one in (self._channel, self._listener, self._wakeup, self._woken):
            if one is not None:
                one.close()


def _become_rank(request: Fork, files: list[int], parent: int) -> None:
    """Make the forked process what it would be if the supervisor had started it as a program."""
    os.setsid()  # a group of its own: what it starts can be ended with it
    _follow_parent(parent)
    logs = [_open_log(Path(name)) for name in request.logs]
    _take_output(logs or files[:2])
    for file in files[0 if logs else 2 :]:
        os.set_inheritable(file, True)  # a device's lock must outlive the exec of a command
    if request.place:
        take_share(*request.place)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(DIES_FIRST))
    own = dict(os.environ) if request.inherits else {}
    _take_place({**own, **request.environment, PARENT: str(parent)}, request.cwd or str(Path.cwd()))


def _take_slots(slots: tuple[int, int] | None) -> None:
    """Tell this process of its memory; without any it must not take a number that it finds for its own."""
    os.environ.pop(SLOTS, None)
    if slots is not None:
        for file in slots:
            os.set_inheritable(file, True)  # for a `command:` with jobkit.init
        os.environ.update(environment_of(slots))


def _open_log(file: Path) -> int:
    """A log file to append to, once its folder can be seen here."""
    until = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if time.monotonic() > until:
                raise
            with contextlib.suppress(OSError):
                list(file.parent.parent.iterdir())  # makes NFS look again
            time.sleep(0.1)


def _start_anew(request: Fork) -> NoReturn:
    """Run the call in a new Python."""
    words = [sys.executable, "-u", "-m", "jobkit.worker.parent", "call", request.target, json.dumps(request.arguments)]
    os.execv(sys.executable, words)


def run_call(target: str, arguments: Sequence[Any]) -> None:
    """Call what `module:function` names."""
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


def _adopt_orphans() -> None:
    """Become the parent of what ranks leave behind (Linux), so that it can be ended."""
    PR_SET_CHILD_SUBREAPER = 36
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _kill_strays() -> None:
    """Kill what killed ranks have left behind in sessions of its own."""
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            send(int(pid), signal.SIGKILL)


def _follow_parent(parent: int) -> None:
    """Get SIGTERM when the parent dies (Linux): a rank is not left behind when the supervisor, and so the parent, ends.

    The signal is lost while it is still ignored; the worker, which installs handlers, compares its parent with
    JOBKIT_PARENT after that.
    """
    if _get_when_parent_ends(signal.SIGTERM) and os.getppid() != parent:  # it died before we could say so
        sys.exit(128 + signal.SIGTERM)


def _get_when_parent_ends(number: signal.Signals) -> bool:
    """Whether this system can send us a signal when the process that started us ends: then it will."""
    PR_SET_PDEATHSIG = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        return False  # not Linux
    return True


def _take_output(files: Sequence[int]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)


def _take_place(environment: Mapping[str, str], cwd: str) -> None:
    """Replace the environment and the current folder, and with them where modules come from."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = [cwd, *(str(Path(cwd, path)) for path in paths if path)]
    sys.path[:] = [*own, *(entry for entry in sys.path[1:] if entry not in own)]  # the first is the folder until now
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def preload(modules: Sequence[str]) -> str | None:
    """Import modules; why a fork afterwards would be no good, where one of them starts a thread or touches a device.

    A fork has none of the threads, and may find locked what they held.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's OpenBLAS starts its threads at the import
    problem = None
    gc.disable()  # what an import makes stays: to look through it while it grows takes 0.8 s of torch's 7
    for name in modules:
        importlib.import_module(name)
        if problem is None and (found := _against_forking()):
            problem = f"importing {name} has {found}"
    gc.collect()  # before the freeze, which would keep the garbage for ever
    gc.freeze()  # the ranks share this memory until somebody writes to it, as each garbage collection would
    gc.enable()
    return problem


def find_harmful(modules: Sequence[str]) -> dict[str, str]:
    """Import modules; those that start a thread or touch a device, and those that cannot be imported, with a reason."""
    harmful: dict[str, str] = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in modules:
            threads, devices = _threads(), _devices()
            try:
                importlib.import_module(name)
            except BaseException as error:
                harmful[name] = f"{type(error).__name__}: {error}"
            if _threads() > threads:
                harmful[name] = "it starts a thread"
            elif opened := _devices() - devices:
                harmful[name] = f"it opens {min(opened)}"
    return harmful


def _against_forking() -> str | None:
    """What a fork of this process would break."""
    if _threads() > 1:
        return "started a thread"
    return f"opened {min(opened)}" if (opened := _devices()) else None


def _threads() -> int:
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/self/task").iterdir()))
    return 1


def _devices() -> set[str]:
    """The files of devices that this process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(file.readlink()))
    return {name for name in found if name.startswith(DEVICE_FILES)}


def adopt(client: Channel, settings: Mapping[str, str], problem: str | None) -> tuple[bool, str | None]:
    """Become the parent of a warm parent's client, where that can be: whether, and why its ranks may not be forked.

    `settings` are those of the imports.
    """
    received = client.receive()
    if received is None or not isinstance(wish := received[0], Adopt):
        return False, None
    _take_output(received[1])
    fits = wish.executable == sys.executable and settings == _read_at_import(wish.environment)
    with contextlib.suppress(OSError):
        client.send(Adopted(accepted=fits))
    if fits:
        _take_place(wish.environment, wish.cwd)
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
    if where == "call":
        _end(_returncode(lambda: run_call(modules[0], json.loads(modules[1]))))
    outcome = _serve_socket(int(where), modules) if where.isdigit() else _serve_job(RunDir(where))
    _end(0 if outcome is None else _returncode(outcome))


def _serve_socket(descriptor: int, modules: Sequence[str]) -> Call | None:
    """Serve a supervisor of this machine, and the clients it may want served."""
    _get_when_parent_ends(signal.SIGKILL)  # an import that hangs never comes to see that the supervisor is gone
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


def _returncode(call: Callable[[], object]) -> int:
    """Run a call as the interpreter runs a program."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(returncode: int) -> NoReturn:
    """End a forked process as multiprocessing does: after its threads and exit functions, without the teardown.

    The interpreter would write to every object that it shares with the server, to free it: 0.6 s a rank. What the
    teardown does for the user's files is done here: one that nobody has closed is to have all that was written to it.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    opened = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]  # since the fork: not the frozen
    for stream in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed by the program itself
            stream.flush()
    del opened
    gc.collect()  # closes what only a circle holds, as the frames that a stop has ended; a zip file gets its end
    os._exit(returncode & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
