"""Signals to a submission: obeyed at once until its job is handed over, and from then on collected."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Submission:
    collected: list[int] = field(default_factory=list)
    handing_over: bool = False

    def handle(self, number: int, frame: object) -> None:
        if not self.handing_over:
            raise KeyboardInterrupt
        self.collected.append(number)


_submission: _Submission | None = None
"""The one that this process makes, as signal handlers are the process's."""


@contextlib.contextmanager
def signals_of_a_submission() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP, or collect them in this list after `hand_over`."""
    global _submission
    _submission = made = _Submission()
    before = {number: signal.signal(number, made.handle) for number in NUMBERS}
    try:
        yield made.collected
    finally:
        _submission = None
        for number, handler in before.items():
            signal.signal(number, handler)


def hand_over() -> None:
    """From here on the job may exist: it is made whole, journalled, and then asked to stop."""
    if _submission is not None:
        _submission.handing_over = True


def take_back() -> None:
    """The job was not made after all: obey what has come meanwhile, and what comes."""
    if _submission is not None:
        _submission.handing_over = False
        if _submission.collected:
            raise KeyboardInterrupt
