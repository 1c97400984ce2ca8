"""Stopping an attempt: signals and the time limit set a flag, and rank 0 asks the scheduler why.

A handler only sets a flag; all that follows happens at a step boundary, on all ranks together.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # signal's makes an enumeration of it, ten times slower
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.forkserver import ForkServer
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE
from jobkit.log import log
from jobkit.run.processes import lives
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import ask
from jobkit.supervisor.parents import PARENT
from jobkit.worker.handlers import Handler, is_callable, is_of_framework, name_of

ASK_SECONDS = 2.0
"""How long to wait for Slurm's record to name a reason: the signal can arrive before the record says why. Not longer:
of a preemption's grace, KillWait + 2 s (32 s by default), the checkpoint needs the rest."""

NUMBERS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Stopped(SystemExit):
    """Raised out of the loop, on every rank, after the checkpoint: this attempt is over, the run is not.

    A SystemExit, so that `except Exception` in a training function does not catch it, and a plain script ends with
    exit code 75.
    """

    def __init__(self, cause: str, step: int, checkpoint: int | None) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.cause = cause
        self.step = step
        self.checkpoint = checkpoint
        """Step of the newest durable checkpoint, with which the next attempt begins; None where there is none."""


class StopSignals:
    """The signals to stop that this process has received. One for each process, since signal handlers are."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The last signal received: SIGTERM, SIGUSR2 or SIGINT."""
        self.received = 0
        """How many have been."""
        self.deadline: float | None = None
        """When to stop for the time limit's sake, by the monotonic clock: the wall clocks of two nodes may differ."""
        self._handler = self._note  # one object, to be told from others' by identity
        self._is_installed = False
        self._before: dict[int, Any] = {}
        """What each signal did before `install`."""
        self._others: dict[int, list[Handler]] = {number: [] for number in NUMBERS}
        """The handlers of the script and of libraries, which are called when the checkpoint of a stop is durable."""
        self._told: set[tuple[int, str]] = set()
        """Of which handlers, and signals, it has been said that jobkit took their place."""
        self._handed_back = False
        """Whether signals go to whom they went to before `install`, as there is no loop that would stop."""

    @property
    def pending(self) -> bool:
        return self.signal is not None or self.overdue

    @property
    def overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def install(self) -> None:
        """Take SIGTERM, SIGUSR2 and SIGINT from here on; in the main thread only.

        Handlers that were there are called after the checkpoint of a stop; a framework's are not.
        """
        self._is_installed = True
        for number in NUMBERS:
            before = signal.signal(number, self._handler)
            if before is not self._handler:
                self._before[number] = before
                self._add(number, before)
        _spare_loader_workers()

    def clear(self) -> None:
        self.signal = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if not self._handed_back:
            self.received += 1
            return
        for handler in self._others[number]:
            handler(number, frame)
        if self._before.get(number) is signal.default_int_handler:
            signal.default_int_handler(number, frame)
        elif self.ends(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # Somebody else's handlers

    def take_back(self) -> list[str]:
        """Take the signals again that others have taken since `install`; what there is to tell of it, once of each.

        Looks in a microsecond. In another thread than the main one, where Python lets nobody set a handler, it only
        looks.
        """
        self._handed_back = False
        if not self._is_installed:
            return []
        told = []
        for number in NUMBERS:
            handler = getsignal(number)
            if handler is self._handler:
                continue
            is_main_thread = threading.current_thread() is threading.main_thread()
            if is_main_thread:
                signal.signal(number, self._handler)
            self._add(number, handler)
            if (number, name_of(handler)) not in self._told:
                self._told.add((number, name_of(handler)))
                told.append(_replaced(number, handler, is_main_thread))
        return told

    def _add(self, number: int, handler: Any) -> None:
        if is_callable(handler) and handler not in self._others[number]:
            self._others[number].append(cast(Handler, handler))

    def call_others(self) -> None:
        """Call the handlers that the script and libraries have for the signal that came. What they raise is told: the
        attempt ends anyway."""
        number = self.signal
        for handler in self._others.get(number, ()) if number is not None else ():
            if is_of_framework(handler):
                continue
            try:
                handler(cast(int, number), None)
            except SystemExit:  # it ends the program, as happens next
                pass
            except BaseException as error:
                log.warning("%s: %s raised %r", _name(cast(int, number)), name_of(handler), error)

    def ends(self, number: int) -> bool:
        """Whether a signal would have ended the process before `install`, there and then."""
        return bool(self._before.get(number) == signal.SIG_DFL)

    def hand_back(self, number: int) -> None:
        """Let signals do what they did before `install`, until `take_back`, beginning with this one, that came.

        From any thread: the main one, in which Python calls handlers, gets it once more.
        """
        self._handed_back = True
        os.kill(os.getpid(), number)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _replaced(number: int, handler: object, is_taken: bool) -> str:
    found = f"{_name(number)}, by which a run is told to stop, was given to another handler: {name_of(handler)}."
    if not is_taken:
        return f"{found} The loop is not in the main thread, so jobkit cannot take it back: such a stop is not seen"
    if is_of_framework(handler):
        return f"{found} jobkit has taken it back, and does not call that one: a stop has one owner"
    called = "; that one is called when the checkpoint of a stop is written" if is_callable(handler) else ""
    return f"{found} jobkit has taken it back{called}"


def _spare_loader_workers() -> None:
    """Have the workers of every DataLoader block the signals from their first moment on, however they are started.

    Slurm signals them too, and one that dies takes its rank with it, before the checkpoint. A process inherits what is
    blocked; it could block anything by itself only after it has imported torch, which sets handlers of its own. Other
    children are not to inherit it, nor what they start: those that are forked have the handlers of `install`, which do
    nothing there, and lose them with a new program. As these ignore SIGTERM, `terminate` sends SIGKILL instead, which
    for a process without handlers is the same.
    """
    start, ensure_running = BaseProcess.start, ForkServer.ensure_running

    def start_spared(process: Any) -> None:
        # torchdata's workers have a loop of their own.
        module = getattr(getattr(process, "_target", None), "__module__", None) or ""
        of_loader = module.startswith(("torch.utils.data.", "torchdata."))
        with _blocked() if of_loader else nullcontext():
            start(process)

    def ensure_running_spared(server: ForkServer) -> None:  # whose workers have what it has
        with _blocked():
            ensure_running(server)

    def terminate(started: Any) -> None:
        started._send_signal(signal.SIGKILL)

    BaseProcess.start = start_spared  # type: ignore[assignment, method-assign]
    ForkServer.ensure_running = ensure_running_spared  # type: ignore[assignment, method-assign]
    Popen.terminate = terminate  # type: ignore[assignment, method-assign]


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


STOP_SIGNALS = StopSignals()


class CauseFinder:
    """Why this attempt is being stopped, for rank 0 to find out: from jobkit's own request to stop, else from the
    scheduler, else from the clock and the signal itself."""

    def __init__(self, run: RunDir, attempt: int, signals: StopSignals, unknown_cause: str | None = None) -> None:
        self.run = run
        self.attempt = attempt
        self.signals = signals
        self.unknown_cause = unknown_cause
        """That of a stop of which neither jobkit nor the scheduler knows; None makes it a false alarm."""
        self.job_id = slurm.current_job() if os.environ.get("JOBKIT_SCHEDULER") == "slurm" else None
        self.margin = 0.0

    def look_around(self) -> None:
        """Learn when Slurm will end this attempt, and whether it is being stopped already.

        Signals that came while the interpreter was starting are lost; the request and the job's record still know.
        """
        if self._requested() is not None:  # the signal for it came before there was a handler
            self.signals.signal = signal.SIGTERM
        job = self._ask() if self.job_id is not None else None
        if job is None:
            return
        if job.limit is not None:
            self.margin = slurm.stop_margin(job.limit)
        if slurm.stop_cause(job, self.margin):
            self.signals.signal = signal.SIGTERM
        elif job.remaining is not None:
            self.signals.deadline = time.monotonic() + job.remaining - self.margin

    def _requested(self) -> str | None:
        request = self.run.stop_request(self.attempt)
        return request.cause if request is not None else None

    def find(self) -> str | None:
        """preempted, timeout, cancelled, killed, user, lost or signal; None for a false alarm."""
        return self._known_cause() or self.unknown_cause

    def _known_cause(self) -> str | None:
        if (requested := self._requested()) is not None:
            return requested
        if self.job_id is None:
            if self.signals.signal is None:
                return None
            # Nobody has asked for a stop where the process that forked this one, or this one's shell, was killed.
            server = os.environ.get(PARENT)
            return "user" if server is None or lives(int(server)) else "lost"
        until = time.monotonic() + ASK_SECONDS
        while True:
            job = self._ask()
            if job is not None and (cause := slurm.stop_cause(job, self.margin)):
                return cause
            if job is not None and self.signals.signal is None and (job.remaining or 0.0) > self.margin:
                self.signals.deadline = time.monotonic() + (job.remaining or 0.0) - self.margin
                return None  # an operator has given the job more time
            by_timer = self.signals.signal == signal.SIGUSR2
            if job is not None and by_timer and slurm.early_timeout_signal(job, self.margin):
                return None  # Slurm's timer may be a minute early; the deadline, which is exact, will say when
            if job is None and self.signals.overdue:
                return "timeout"
            if time.monotonic() >= until:
                return "signal"  # someone's own `scancel --signal`: save, and go on in a new attempt
            time.sleep(0.3)  # all jobs of a cluster share its slurmctld

    def _ask(self) -> slurm.JobInfo | None:
        assert self.job_id is not None
        return ask(self.job_id, timeout=5.0)  # a save is waiting for the answer


# The processes around a rank


def kill_children() -> None:
    """End what this process forked and did not end: such children have SIGTERM blocked."""
    children = multiprocessing.active_children()
    if children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise that a loader's worker was killed
    for child in children:
        child.kill()


def follow_parent() -> None:
    """Stop if the process that forked this one has died: its SIGTERM for that is lost while signals are ignored."""
    if str(os.getppid()) != os.environ.get(PARENT):
        os.kill(os.getpid(), signal.SIGTERM)
