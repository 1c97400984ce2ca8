"""Scripts with jobkit.init() that have no loop which would stop: what a signal does there, and what is told of it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

from jobkit.log import log
from jobkit.worker.advice import what_to_write
from jobkit.worker.context import Context
from jobkit.worker.stop import StopSignals

WAIT_SECONDS = 2.0
"""How long after a signal the loop may still begin: then the run stops in order, with its exit code. Of a preemption's
grace this is a small part."""

POLL_SECONDS = 0.2
"""How often it is looked whether a signal has come, before the loop."""


class SignalsBeforeLoop:
    """A thread that sees a signal to stop while there is no loop: it says so, and lets the signal do what it did before
    jobkit.init, as nothing is lost by it.

    Each rank sees to its own signals: no agreement is possible where the ranks do not come to a boundary.
    """

    def __init__(self, context: Context, signals: StopSignals, on_end: Callable[[], None]) -> None:
        self._context, self._signals, self._on_end = context, signals, on_end
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Look from here on; `on_end` is called before a signal ends the process."""
        threading.Thread(target=self._work, name="jobkit-signals", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _work(self) -> None:
        while not self._is_over.wait(POLL_SECONDS) and not self._context.ending.has_begun:
            received = self._signals.received
            if not self._signals.pending or not self._is_without_loop():
                continue
            self._tell()
            if self._signals.signal in (signal.SIGTERM, signal.SIGINT):
                self._hand_back(self._signals.signal)
                return
            while self._signals.received == received and not self._is_over.wait(POLL_SECONDS):
                pass  # it has been told once, and ends nothing: the next one may

    def _is_without_loop(self) -> bool:
        """Whether no loop begins in time, and no evaluation is under way, which stops by itself."""
        until, received = time.monotonic() + WAIT_SECONDS, self._signals.received
        while time.monotonic() < until and self._signals.received == received:  # a second Ctrl-C waits no longer
            if self._is_over.wait(POLL_SECONDS) or self._context.ending.has_begun:
                return False
        return not self._context.ending.is_evaluating

    def _tell(self) -> None:
        number = self._signals.signal
        what = "The time limit is near" if number is None else f"{signal.Signals(number).name} came"
        if self._context.is_main:
            log.info("%s, and no loop of jobkit's has begun, so there is no checkpoint to write.", what)
            log.info("%s", what_to_write())

    def _hand_back(self, number: int) -> None:
        if self._signals.ends(number):
            self._on_end()
        sys.stdout.flush()
        sys.stderr.flush()
        self._signals.hand_back(number)
