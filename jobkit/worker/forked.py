"""What a process that a parent has forked does to become what a program of its own would be, and to end as one.

Where a fork would be no good, `jobkit/start.py jobkit.worker.forked MODULE:FUNCTION ARGUMENTS` does it in a new Python.
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
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jobkit import start
from jobkit.run.files import is_there
from jobkit.run.slots import SLOTS, environment_of
from jobkit.supervisor.channel import Fork
from jobkit.supervisor.parents import PARENT
from jobkit.worker.cpus import take_share

DIES_FIRST = 300
"""A rank's oom_score_adj: where memory is short the kernel is to kill it, and not the parent that starts it again."""

VISIBLE_SECONDS = 60.0
"""How long a folder that another host has made may be invisible on NFS."""


def become_rank(request: Fork, files: list[int], parent: int) -> None:
    """Make the forked process what it would be if the supervisor had started it as a program."""
    os.setsid()  # a group of its own: what it starts can be ended with it
    _follow_parent(parent)
    logs = [_open_log(Path(name)) for name in request.logs]
    take_output(logs or files[:2])
    for file in files[0 if logs else 2 :]:
        os.set_inheritable(file, True)  # a device's lock must outlive the exec of a command
    if request.place:
        take_share(*request.place)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(DIES_FIRST), encoding="utf-8")
    own = dict(os.environ) if request.inherits else {}
    take_place({**own, **request.environment, PARENT: str(parent)}, request.cwd or str(Path.cwd()))


def take_slots(slots: tuple[int, int] | None) -> None:
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
            is_there(file.parent)
            time.sleep(0.1)


def start_anew(request: Fork) -> NoReturn:
    """Run the call in a new Python."""
    words = start.words("jobkit.worker.forked", request.target, json.dumps(request.arguments))
    os.execv(words[0], words)


def run_call(target: str, arguments: Sequence[Any]) -> None:
    """Call what `module:function` names."""
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


def _follow_parent(parent: int) -> None:
    """Get SIGTERM when the parent dies (Linux): a rank is not left behind when the supervisor, and so the parent, ends.

    The signal is lost while it is still ignored; the worker, which installs handlers, compares its parent with
    JOBKIT_PARENT after that.
    """
    if get_when_parent_ends(signal.SIGTERM) and os.getppid() != parent:  # it died before we could say so
        sys.exit(128 + signal.SIGTERM)


def get_when_parent_ends(number: signal.Signals) -> bool:
    """Whether this system can send us a signal when the process that started us ends: then it will."""
    PR_SET_PDEATHSIG = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        return False  # not Linux
    return True


def take_output(files: Sequence[int]) -> None:
    """Make open files the output and the errors of this process."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)


def take_place(environment: Mapping[str, str], cwd: str) -> None:
    """Replace the environment and the current folder, and with the environment where modules come from.

    Not from the folder: the user's code is imported from a snapshot of it, which a rank puts there.
    """
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = [str(Path(cwd, path)) for path in paths if path and Path(cwd, path) != Path(cwd)]
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in own)]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def run_and_end(call: Callable[[], object]) -> NoReturn:
    """Run a call as the interpreter runs a program, and end with its exit code."""
    try:
        call()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
            end(1)
        end(stop.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def end(returncode: int) -> NoReturn:
    """End a forked process as multiprocessing does: after its threads and exit functions, without the teardown.

    Threads of one that has failed, or has been stopped, are not waited for: other ranks wait for its end.

    The interpreter would write to every object that it shares with its parent, to free it: 0.6 s a rank. What the
    teardown does for the user's files is done here: one that nobody has closed is to have all that was written to it.
    """
    if returncode == 0:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    opened = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]  # since the fork: not the frozen
    for stream in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed by the program itself
            stream.flush()
    del opened
    gc.collect()  # closes what only a circle holds, as the frames that a stop has ended; a zip file gets its end
    os._exit(returncode & 0xFF)


def main(arguments: Sequence[str]) -> NoReturn:
    """Run one call, and end as a program does."""
    target, written = arguments
    run_and_end(lambda: run_call(target, json.loads(written)))
