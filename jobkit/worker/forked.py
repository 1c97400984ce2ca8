"""A process that the agent has forked becomes a rank, and ends as a program of its own would end.

    agent --fork--> become_rank() -> run_rank_program() -> Submitit's process_job -> Worker()
        -> task.py -> ending.py: RankReport, exit code -> end()

`jobkit/start.py jobkit.worker.forked RUNDIR` runs the same in a new Python, where a fork would be no good.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from jobkit import start
from jobkit.errors import JobkitError
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import RankPlace, StartRanks
from jobkit.wire.pages import VARIABLE, Page
from jobkit.wire.signals import STOP_SIGNALS
from jobkit.worker.cpus import take_share

DIES_FIRST = 300
"""A rank's oom_score_adj: where memory is short the kernel kills a rank, and not the agent that starts it again."""


def become_rank(run: RunDir, place: RankPlace, attempt: StartRanks, page: Page, environment: Mapping[str, str]) -> None:
    """Make a forked process like a program that a launcher starts: session, logs, CPUs, variables.

    Its stop signals are blocked until the end: before that a handler of the agent would get them.
    """
    agent = os.getppid()
    os.setsid()  # what the rank starts can be ended with it
    die_with_parent(agent)
    logs = run.logs(attempt.attempt)
    logs.mkdir(parents=True, exist_ok=True)  # NFS may not show yet that another host has made it
    files = [os.open(os.devnull, os.O_RDONLY)]
    for stream in ("out", "err"):
        log = run.rank_log(attempt.attempt, place.rank, stream)
        files.append(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    take_share(place.local_rank, place.local_world_size)
    Path("/proc/self/oom_score_adj").write_text(str(DIES_FIRST), encoding="utf-8")
    os.set_inheritable(page.descriptor, True)  # for the program of a `command:`
    os.environ.clear()
    os.environ.update({**environment, VARIABLE: str(page.descriptor)})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if attempt.salvage else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies: nobody else could end it."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGKILL)


def run_rank_program(run: RunDir) -> NoReturn:
    """Run the pickled Worker as Submitit does, and end this process."""
    from submitit.core.logger import get_logger
    from submitit.core.submission import process_job

    def program() -> None:
        run.refuse_foreign()  # again: somebody may have written there since the job began
        process_job(run.submitit)

    get_logger().setLevel("WARNING")  # a rank's log is for the output of the user's code
    run_and_end(program)


def start_anew(run: RunDir, module: str) -> NoReturn:
    """Run the rank in a new Python: threads or devices of the agent's imports would be broken in a fork."""
    words = start.words(module, str(run.path))
    os.execv(words[0], words)


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run a program as the interpreter runs one, and end with its exit code."""
    try:
        program()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
            end(1)
        end(stop.code or 0)
    except JobkitError as error:
        print(f"error: {error}", file=sys.stderr)
        end(1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def end(code: int) -> NoReturn:
    """End a forked process: after its threads and exit functions, without the interpreter's teardown.

    The teardown would write to every object that it shares with the agent, to free it: 0.6 s a rank with torch. The
    part of it that matters to users is here: files that nobody has closed get all that was written to them. Threads of
    a rank that failed are not waited for, since other ranks wait for its end.
    """
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    opened = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]  # since the fork: not the frozen
    for stream in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a file that the program has closed
            stream.flush()
    del opened
    gc.collect()  # closes files that only a cycle of objects holds; a zip file gets its end
    os._exit(code & 0xFF)


def main(arguments: list[str]) -> NoReturn:
    run_rank_program(RunDir(arguments[0]))
