"""The signals that stop ranks: a handler only sets flags, those of the pages that the ranks look at between two steps.
A handler of the user's own is called after it.

Slurm, a person --SIGTERM, SIGUSR2--> agent --page.ask_to_stop()--> its ranks
                                      rank  --page.ask_to_stop()--> itself

At the next agreement the loop saves and raises Stopped (loop/loop.py); worker/ending.py makes it exit code 75.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from jobkit.errors import EXIT_RESUMABLE
from jobkit.wire.pages import Page, Phase

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm sends SIGTERM for a preemption and a scancel; SIGUSR2 where a cluster has preempt_send_user_signal."""

ONE_CTRL_C_SECONDS = 1.0
"""A terminal sends a Ctrl-C to torchrun's workers, and torchrun sends it to them once more."""


_taken: list[Callable[[], None]] = []
"""The functions that make this process's handlers the first ones again."""

_freed: list[Callable[[], None]] = []
"""The functions that give a process which this one forks the SIGTERM that it has without jobkit."""

_forks = threading.local()
"""The signal mask of a thread before it forks."""


def take_stop_signals(page: Page | None = None, *, ctrl_c: bool = False) -> None:
    """Let the stop signals set the flag of this rank's page, from here on; for the main thread.

    Before its loop a rank has nothing to save: then they end the process at once. With `ctrl_c` the first Ctrl-C and a
    closed terminal do the same, for a script that a person started; a second Ctrl-C is Python's.

    A handler of the user's own is called after the flag is set. It may not end the rank by an exception: the step under
    way would be lost. A process that the rank forks sets no flag, and SIGTERM ends it as without jobkit.
    """
    page = page or Page.of_environment(os.environ)
    if page is None:
        return
    rank = os.getpid()

    pressed: list[float] = []
    users: dict[int, Callable[[int, FrameType | None], object]] = {}
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            pressed.append(time.monotonic())
            if pressed[-1] - pressed[0] > ONE_CTRL_C_SECONDS:
                raise KeyboardInterrupt
        if os.getpid() != rank:
            if number in users:
                users[number](number, frame)
            return
        if number == signal.SIGHUP:
            for descriptor in terminals:  # the terminal is gone: a print of the script would raise an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        page.ask_to_stop()
        if (theirs := users.pop(number, None)) is not None:  # away meanwhile: it may call this one, as the one before
            try:
                theirs(number, frame)
            except BaseException as error:
                line = f"jobkit: the script's handler of signal {number} raised {error!r}; jobkit saves and stops\n"
                os.write(2, line.encode(errors="replace"))
            users[number] = theirs
        if page.read().phase is Phase.STARTING:
            os._exit(EXIT_RESUMABLE)

    of_terminal = [signal.SIGINT] if ctrl_c else []
    if ctrl_c and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        of_terminal.append(signal.SIGHUP)

    def take() -> None:
        for number in (*STOP_SIGNALS, *of_terminal):
            before = signal.signal(number, stop)
            if callable(before) and before not in (stop, signal.default_int_handler):
                users[number] = before

    def free() -> None:
        # A handler in Python comes too late for a process that is about to wait for a lock, and its pool waits for it.
        if signal.SIGTERM not in users and signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    take()
    if not _taken:
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_free_child)
    _taken[:] = [take]
    _freed[:] = [free]


def _hold_sigterm() -> None:
    """Let SIGTERM wait: Python drops what a forked process receives before its first line."""
    _forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forks.mask)


def _free_child() -> None:
    for free in _freed:
        free()
    _release_sigterm()


def take_stop_signals_again() -> None:
    """Come first again, before handlers that the script has set since: the loop begins."""
    for take in _taken if threading.current_thread() is threading.main_thread() else ():
        take()


class AgentSignals:
    """The stop signals that an agent has received; SIGCHLD wakes it too, for ranks that end."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        """The pages of the ranks that run."""
        self._received: list[int] = []
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self.install()

    def install(self) -> None:
        """Install the handlers; again after imports, which may have installed their own."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the byte in the socket is what wakes the loop
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for page in self.pages:
            page.ask_to_stop()

    def take(self) -> list[int]:
        """Return those that came since the last call."""
        received, self._received = self._received, []
        return received

    def fileno(self) -> int:
        return self._woken.fileno()

    def clear(self) -> None:
        """Take the bytes that have woken the loop."""
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._waker.close()
        self._woken.close()
