"""`jobkit/start.py jobkit.mirror.main RUN`: copies a run's curves until its standard input ends.

A process of its own: a service that does not answer, or a package that takes its time, costs the training nothing.
Rank 0 starts it and holds the other end of its standard input, which ends with that rank, however it dies.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from jobkit.log import configure
from jobkit.mirror.mirroring import follow
from jobkit.run.rundir import RunDir

FOR_THE_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that a job's processes get all together: this one ends after the ranks."""


def main(argv: Sequence[str]) -> int:
    """Copy until the end of standard input."""
    for number in FOR_THE_RANKS:
        signal.signal(number, signal.SIG_IGN)
    configure()
    follow(RunDir(argv[0]), sys.stdin.buffer)
    return 0
