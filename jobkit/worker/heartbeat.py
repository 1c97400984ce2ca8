"""A count that goes up with every step, for the watchdog outside (supervisor/watchdog.py)."""

from __future__ import annotations

import resource
import time
from typing import Any


class Heartbeat:
    """Beats at every step boundary, batch of an evaluation and end of a checkpoint."""

    def __init__(self) -> None:
        self.beats = 0
        self.training = False
        """Whether the loop is under way: before and after it nothing is known of how long things take."""
        self.slowest = 0.0
        """The longest time between two beats, in seconds; the first step, which compiles and warms up, is left out."""
        self.stopping = False
        """Whether the ranks have agreed to stop, and are writing the last checkpoint."""
        self._last = time.monotonic()

    def beat(self) -> None:
        now = time.monotonic()
        if self.training and self.beats > 1:
            self.slowest = max(self.slowest, now - self._last)
        self.beats += 1
        self._last = now

    def begin(self) -> None:
        self.beats, self.training = 0, True
        self.beat()

    def end(self) -> None:
        self.training = False
        self.beat()

    def report(self) -> dict[str, Any]:
        return {
            "beats": self.beats,
            "training": self.training,
            "slowest": round(self.slowest, 3),
            "stopping": self.stopping,
            "idle": round(time.monotonic() - self._last, 3),  # seconds since the last beat
        }


def peak_bytes() -> int:
    """The most host memory this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
