"""The signals that stop ranks: a handler only sets flags, those of the pages that the ranks look at between two steps.

Slurm, a person --SIGTERM, SIGUSR2--> agent --page.ask_to_stop()--> its ranks
                                      rank  --page.ask_to_stop()--> itself
"""

from __future__ import annotations

import os
import signal
import socket
import time
from types import FrameType

from jobkit.errors import EXIT_RESUMABLE
from jobkit.run.slots import Page, Phase

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm sends SIGTERM for a preemption and a scancel; SIGUSR2 where a cluster has preempt_send_user_signal."""

ONE_CTRL_C_SECONDS = 1.0
"""A terminal sends a Ctrl-C to torchrun's workers, and torchrun sends it to them once more."""


def take_stop_signals(page: Page | None = None, *, ctrl_c: bool = False) -> None:
    """Let the stop signals set the flag of this rank's page, from here on; for the main thread.

    Before its loop a rank has nothing to save: then they end the process at once. With `ctrl_c` the first Ctrl-C and a
    closed terminal do the same, for a script that a person started; a second Ctrl-C is Python's.
    """
    page = page or Page.of_environment(os.environ)
    if page is None:
        return

    pressed: list[float] = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            pressed.append(time.monotonic())
            if pressed[-1] - pressed[0] > ONE_CTRL_C_SECONDS:
                raise KeyboardInterrupt
        if number == signal.SIGHUP:
            for descriptor in terminals:  # the terminal is gone: a print of the script would raise an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        page.ask_to_stop()
        if page.read().phase is Phase.STARTING:
            os._exit(EXIT_RESUMABLE)

    of_terminal = [signal.SIGINT] if ctrl_c else []
    if ctrl_c and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        of_terminal.append(signal.SIGHUP)
    for number in (*STOP_SIGNALS, *of_terminal):
        signal.signal(number, stop)


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
