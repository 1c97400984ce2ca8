"""The end of a run as whoever watches it sees it: its exit code, and the last that its processes print."""

from __future__ import annotations

import time
from collections.abc import Callable

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.observer import is_gone

LAST_SECONDS = 15.0
"""How long what is printed after a run's end is waited for: its processes say goodbye, and a `teardown` may go on."""

PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between two looks whether its job has ended; the last one again and again."""


def exit_code(state: State) -> int:
    """Of whoever waited for a run: 0 finished, 1 failed, 75 stopped otherwise, so that it can be continued."""
    return {State.FINISHED: EXIT_FINISHED, State.FAILED: EXIT_FAILED}.get(state, EXIT_RESUMABLE)


def read_to_the_end(
    run: RunDir, status: Status, read: Callable[[], None], gone: Callable[[RunDir, Status], bool] = is_gone
) -> None:
    """Call `read` until the job of a run that is over has ended: its processes print after its end was recorded.

    What is printed last is there before the job has gone, and read after that was seen.
    """
    until, looks = time.monotonic() + LAST_SECONDS, 0
    while True:
        try:
            is_last = gone(run, status)
        except SchedulerError:
            is_last = True  # nobody knows, and what is there is read
        read()
        if is_last or time.monotonic() > until:
            return
        time.sleep(PAUSES[min(looks, len(PAUSES) - 1)])
        looks += 1
