"""`python -u -m jobkit.worker.fork_server FD MODULE...`: imports the modules once and forks ranks that have them.

FD is one end of a Unix socket; jobkit/supervisor/fork_client.py has the other and says which processes to fork. It
serves until that end is closed. Four ranks reach their first step 0.13 s after such a fork, against 9 s with an
import each. A fork copies one thread and no state of a device: so the server has one thread and touches no device.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jobkit.log import configure, log
from jobkit.supervisor.fork_client import PARENT, Channel

IGNORED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""By the server for ever, and by a rank until the worker takes them: before that nothing is there to save."""

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHONHASHSEED"),
    *("TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_CPP_"),
)
"""Beginnings of variables that libraries read when they are imported: a warm server cannot change them afterwards."""


Call = Callable[[], None]
"""What a forked process is to run."""


class Server:
    """Forks processes for one client and reports how they end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._listener: socket.socket | None = None
        self._wakeup, self._woken = socket.socketpair()
        for end in (self._wakeup, self._woken):
            end.setblocking(False)
        self._ranks: set[int] = set()
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the byte in the socket is what wakes the loop

    def serve(self) -> Call | Channel | None:
        """Do what the client asks for until it is gone: None.

        Returns in each forked process, too: with the call of a rank, or with the connection of a new client. So the
        rank runs at the top of the program, and ends as any program does.
        """
        self._tell({"ready": True})
        while True:
            sources: list[Any] = [self._channel, self._wakeup, *([self._listener] if self._listener else [])]
            readable, _, _ = select.select(sources, [], [])
            if self._wakeup in readable:
                self._reap()
            if self._listener in readable and (client := self._fork_server()) is not None:
                return client
            if self._channel in readable:
                received = self._channel.receive()
                if received is None:
                    self._leave()  # its ranks end now, and there is nobody left to tell
                    return None
                request, files = received
                if "listen" in request:
                    self._listener = socket.socket(fileno=files[0])
                elif (call := self._fork_rank(request["fork"], files)) is not None:
                    return call

    def _fork_rank(self, request: Mapping[str, Any], files: list[int]) -> Call | None:
        """Fork one rank: None in the server, the call in the rank."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"failed": str(error)})
            pid = -1
        if pid == 0:
            self._leave()  # first: the sockets' other ends must see the server's death, and not wait for this rank's
            _become_rank(request, files, server)
            module, _, name = request["target"].partition(":")
            return lambda: getattr(importlib.import_module(module), name)(*request["arguments"])
        for file in files:
            os.close(file)
        if pid > 0:
            self._ranks.add(pid)
            self._tell({"forked": pid})
        return None

    def _fork_server(self) -> Channel | None:
        """Fork a server for a new client: None in this one, the connection in the new one."""
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if os.fork() == 0:
            self._leave()
            os.setsid()
            return Channel(connection)
        connection.close()
        return None

    def _reap(self) -> None:
        """Report every child that has ended; one signal may stand for several."""
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._ranks:
                    self._ranks.discard(pid)
                    self._tell({"ended": pid, "returncode": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the client is gone, as the next `receive` will say
            self._channel.send(message)

    def _leave(self) -> None:
        """Let go of what is the server's: in a forked process, and at the end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._channel, self._listener, self._wakeup, self._woken):
            if one is not None:
                one.close()


def _become_rank(request: Mapping[str, Any], files: list[int], server: int) -> None:
    """Make the forked process what it would be if its client had started it as a program."""
    os.setsid()  # a group of its own: what it starts can be ended with it
    _follow_server(server)
    _take_output(files[:2])
    for file in files[2:]:
        os.set_inheritable(file, True)  # a device's lock must outlive the exec of a command
    _take_place({**request["environment"], PARENT: str(server)}, request["cwd"])


def _follow_server(server: int) -> None:
    """Get SIGTERM when the server dies (Linux): a rank is not left behind when the supervisor, and so the server, ends.

    The signal is lost while it is still ignored; the worker, which installs handlers, compares its parent with
    JOBKIT_PARENT after that.
    """
    if _get_when_parent_ends(signal.SIGTERM) and os.getppid() != server:  # it died before we could say so
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


def preload(modules: Sequence[str]) -> None:
    """Import modules, and say which of them starts a thread: a fork has none, and may find locked what it held."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's OpenBLAS starts its threads at the import
    threads = _threads()
    gc.disable()  # what an import makes stays: to look through it while it grows takes 0.8 s of torch's 7
    for name in modules:
        importlib.import_module(name)
        if _threads() > threads:
            threads = _threads()
            log.warning(f"importing {name} has started a thread: ranks that are forked beside it may hang")
    gc.collect()  # before the freeze, which would keep the garbage for ever
    gc.freeze()  # the ranks share this memory until somebody writes to it, as each garbage collection would
    gc.enable()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").is_dir() else 1


def adopt(client: Channel, settings: Mapping[str, str]) -> bool:
    """Become the server of a client of a warm server, where that can be; `settings` are those of the imports."""
    received = client.receive()
    if received is None:
        return False
    wish, files = received
    _take_output(files)
    fits = wish["executable"] == sys.executable and settings == _read_at_import(wish["environment"])
    with contextlib.suppress(OSError):
        client.send({"accepted": fits})
    if fits:
        _take_place(wish["environment"], wish["cwd"])
        preload(wish["preload"])
    return fits


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def main(arguments: list[str]) -> None:
    """Serve one client; in a forked process, run what it was forked for."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _get_when_parent_ends(signal.SIGKILL)  # an import that hangs never comes to see that the client is gone
    configure("stderr")
    descriptor, *modules = arguments
    channel = Channel(socket.socket(fileno=int(descriptor)))
    settings = _read_at_import(os.environ)
    preload(modules)
    outcome = Server(channel).serve()
    if isinstance(outcome, Channel):
        outcome = Server(outcome).serve() if adopt(outcome, settings) else None
    _end(0 if outcome is None or isinstance(outcome, Channel) else _returncode(outcome))


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
