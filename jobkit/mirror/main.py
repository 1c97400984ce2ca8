"""`jobkit/start.py jobkit.mirror.main RUN SERVICE`: copies a run's curves until its standard input ends.

A process for each service: one that does not answer, or a package that takes its time, costs the training and the other
services nothing.
Rank 0 starts it and holds the other end of its standard input, which ends with that rank, however it dies.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence

from jobkit.log import configure
from jobkit.mirror.mirroring import follow, mirrors_of
from jobkit.run.rundir import RunDir

FOR_THE_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that a job's processes get all together: this one ends after the ranks."""


END_SECONDS = 60.0
"""How long it may take after that rank: a service that does not answer must not keep it here for ever."""


def main(argv: Sequence[str]) -> int:
    """Copy until the end of standard input."""
    threading.Thread(target=_end_in_time, daemon=True).start()
    for number in FOR_THE_RANKS:
        signal.signal(number, signal.SIG_IGN)
    configure()
    run, service = RunDir(argv[0]), argv[1]
    follow(next(mirror for mirror in mirrors_of(run) if mirror.service == service), sys.stdin.buffer)
    return 0


def _end_in_time() -> None:
    select.select([sys.stdin], [], [])
    time.sleep(END_SECONDS)
    os._exit(1)
