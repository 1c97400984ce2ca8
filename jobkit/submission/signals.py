"""Signals to a submission: obeyed at once until its job is handed over, and from then on collected."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Submission:
    collected: list[int] = field(default_factory=list)
    handing_over: bool = False
    has_others: bool = False
    """Whether it is one of several, of which there is one already: a closed terminal keeps none of the rest away."""

    def handle(self, number: int, frame: object) -> None:
        if not self.handing_over and not (self.has_others and number == signal.SIGHUP):
            raise KeyboardInterrupt
        self.collected.append(number)


_submission: _Submission | None = None
"""The one that this process makes, as signal handlers are the process's."""


@contextlib.contextmanager
def signals_of_a_submission() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP, or collect them in this list after `hand_over`.

    Within another one, of several submissions, what was collected is in that one's list, too.
    """
    global _submission
    outer = _submission
    _submission = made = _Submission(has_others=outer is not None and outer.handing_over)
    before = {number: signal.signal(number, made.handle) for number in NUMBERS}
    try:
        yield made.collected
    finally:
        _submission = outer
        if outer is not None:
            outer.collected += made.collected
            outer.handing_over |= made.handing_over  # before its own handlers are back: there is a job
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


def is_told_to_stop(collected: Iterable[int]) -> bool:
    """Whether one of these signals asks for an end: that of a closed terminal does not."""
    return any(number != signal.SIGHUP for number in collected)
