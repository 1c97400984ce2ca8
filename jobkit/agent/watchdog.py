"""The watchdog's limits: how long a rank may be silent. The agent asks it about the beats in each rank's page.

    rank --beat--> Page --Page.read()--> Watch.silence() --> seconds of silence --Silent--> supervisor

Another process watches, because a rank that is stopped, or loops in C, cannot notice its own silence. Nothing is ended
here: supervisor/running.py decides that.
"""

from __future__ import annotations

import math

from jobkit.duration import parse_seconds
from jobkit.wire.pages import Beat, Phase

LEAST_SECONDS = 300.0
"""`watchdog: auto` waits at least this long: a step may hold a checkpoint to a slow disk."""

TIMES_SLOWEST = 20.0
"""`watchdog: auto` waits this many times as long as the slowest step so far took."""

OUTSIDE_LOOP_SECONDS = 1800.0
"""The least outside of steps: imports, the model, the first step (compilation), validations, the lines between two
passes of ctx.batches, the last checkpoint, the end."""

GAP_SECONDS = 30.0
"""An agent that has not looked for this long was stopped itself, as the ranks may have been (`scontrol suspend`): they
get the whole time again."""


def silence_of(setting: str | int | bool) -> float | None:
    """Return the YAML's `watchdog` in seconds, None for `auto`, 0 for off.

    YAML reads a bare `off` as false.
    """
    if setting in ("off", False):
        return 0.0
    return None if setting == "auto" else float(parse_seconds(setting))


def limit(silence: float | None, beat: Beat) -> float:
    """Return the seconds without a beat after which a rank counts as hung, by its last beat."""
    if silence == 0:
        return math.inf
    if silence is None:
        silence = max(LEAST_SECONDS, TIMES_SLOWEST * beat.slowest)
    in_a_step = beat.phase == Phase.STEPPING and beat.slowest > 0
    return silence if in_a_step else max(silence, OUTSIDE_LOOP_SECONDS)


class Watch:
    """Watches one rank. `watches` is False for a rank that may never beat, as a program under
    `command:`; once it beats it is watched.

        watch = Watch(silence_of(config.watchdog), not config.command, time.monotonic())
        if (seconds := watch.silence(page.read(), time.monotonic())) is not None: ...    # Silent(seconds=seconds)
    """

    def __init__(self, silence: float | None, watches: bool, now: float) -> None:
        self._silence, self._watches = silence, watches
        self._beats, self._since, self._looked = 0, now, now

    def silence(self, beat: Beat, now: float) -> float | None:
        """Return how long the rank has been silent, if that is too long; to be called every few seconds."""
        was_stopped = now - self._looked > GAP_SECONDS
        self._looked = now
        if beat.beats != self._beats or was_stopped or not (self._watches or beat.beats):
            self._beats, self._since = beat.beats, now
        seconds = now - self._since
        return seconds if seconds >= limit(self._silence, beat) else None
