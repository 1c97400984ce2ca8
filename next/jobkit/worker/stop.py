"""The signals that stop a rank: a handler that only sets the flag in the rank's page.

    Slurm, agent --SIGTERM, SIGUSR2--> handler --> page.stop_asked <-- the loop looks between two steps

Before its loop a rank has nothing to save: then the handler ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from jobkit.errors import EXIT_RESUMABLE
from jobkit.run.slots import Page, Phase

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm sends SIGTERM for a preemption and a scancel; SIGUSR2 where a cluster has preempt_send_user_signal."""


def take_stop_signals() -> None:
    """Let the stop signals set the flag of this rank's page, from here on; for the main thread."""
    page = Page.of_environment(os.environ)
    if page is None:
        return

    def stop(number: int, frame: FrameType | None) -> None:
        page.ask_to_stop()
        if page.read().phase is Phase.STARTING:
            os._exit(EXIT_RESUMABLE)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
