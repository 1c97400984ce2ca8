"""Notices to stop: signals and the deadline. A handler sets a flag; all that follows happens at a step boundary."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from jobkit.supervisor.fork_client import PARENT


class Notices:
    """What this process has been told. One for each process, since signal handlers are."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The last signal received: SIGTERM, SIGUSR2 or SIGINT."""
        self.deadline: float | None = None
        """When to stop for the time limit's sake, by the monotonic clock: a node's other one may be off."""

    @property
    def pending(self) -> bool:
        """Whether there is a reason to ask the scheduler what is going on."""
        return self.signal is not None or self.overdue

    @property
    def overdue(self) -> bool:
        """Whether it is time to stop for the time limit's sake."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def install(self) -> None:
        """Take SIGTERM, SIGUSR2 and SIGINT from here on; in the main thread only."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Slurm signals data loader workers too, and one that dies takes its rank with it, before the checkpoint.
        os.register_at_fork(after_in_child=_block_signals)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signal = number

    def clear(self) -> None:
        """Forget a signal that turned out to be no reason to stop."""
        self.signal = None


NOTICES = Notices()


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT})


def kill_children() -> None:
    """End what this process forked and did not end: such children no longer listen to a polite signal."""
    children = multiprocessing.active_children()
    if children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise that a loader's worker was killed
    for child in children:
        child.kill()


def follow_parent() -> None:
    """Stop if the process that forked this one has died: its SIGTERM for that is lost while signals are ignored."""
    if str(os.getppid()) != os.environ.get(PARENT):
        os.kill(os.getpid(), signal.SIGTERM)
