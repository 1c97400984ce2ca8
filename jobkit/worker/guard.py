"""A small process beside a parent on this machine that ends what ranks have left, where the parent has died.

A rank's first process gets SIGTERM from the kernel then. What that one has started gets nothing, and would train on
beside the next attempt. On Slurm slurmstepd ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from typing import NoReturn

from jobkit.run.processes import catches, in_sessions

SAVE_SECONDS = 600.0
"""What those that have a handler for SIGTERM get to save, as when their run is cancelled."""

LOOK_SECONDS = 0.2


class Guard:
    """The parent's end of it."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            os.setsid()
            # Whoever waits for the end of what the parent has open must not wait for this process.
            nowhere = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(nowhere, standard)
            os.dup2(read, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            _guard(3)
        os.close(read)

    def watch(self, ranks: Collection[int]) -> None:
        """These are the ranks that live, each the first of a session."""
        with contextlib.suppress(OSError):  # somebody has killed it
            os.write(self._write, f"{' '.join(map(str, ranks))}\n".encode())

    def close(self) -> None:
        """Let go of it: in a forked process, and at the end."""
        os.close(self._write)


def _guard(descriptor: int) -> NoReturn:
    try:
        with os.fdopen(descriptor, encoding="utf-8") as lines:
            ranks = ""
            for line in lines:  # until the parent has died, or ended
                ranks = line
        end_sessions({int(pid) for pid in ranks.split()}, SAVE_SECONDS)
    finally:
        os._exit(0)


def end_sessions(sessions: Collection[int], seconds: float) -> None:
    """End the processes of some sessions: those with a handler for SIGTERM get it, once, and so many seconds."""
    until, told = time.monotonic() + seconds, set[int]()
    while left := in_sessions(sessions):
        for session in sessions:
            if session in left and time.monotonic() < until:
                continue  # its first process has had its SIGTERM, and sees to the others
            own = in_sessions({session})
            saving = [pid for pid in own if catches(pid, signal.SIGTERM)] if time.monotonic() < until else []
            for pid in set(saving) - told if saving else own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if saving else signal.SIGKILL)
            told.update(saving)
        time.sleep(LOOK_SECONDS)
