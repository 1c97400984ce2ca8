"""Signals to a submitting command: obeyed at once until the job exists, from then on collected for the follower.

KeyboardInterrupt  <- SIGINT, SIGTERM, SIGHUP -> signals.received (after `job_exists`): ask the run to stop

submit.py makes it, follow.py and local_sweep.py read it.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Handles a command's signals while it is entered. A SIGHUP that was ignored (nohup) stays ignored.

    with Signals() as signals:
        signals.job_exists()
        process = start(plan, token)
        follow(run, process, signals)     # looks at signals.received
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """The signals since `job_exists`."""
        self._collects = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def job_exists(self) -> None:
        """From here on a signal is no reason to end the command: the job has to hear of it."""
        self._collects = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._collects:
            raise KeyboardInterrupt
        self.received.append(number)
