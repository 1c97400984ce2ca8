"""The supervisor's own process as the job of a local run: its signals, its foreground command, its exit code."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from jobkit import slurm
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor.nodes import FOREGROUND_PIPE
from jobkit.supervisor.presence import RunRemoved, clear_up
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.time_limit import LocalTimeLimit, TimeLimit

T = TypeVar("T")


class LocalJob:
    """SIGTERM, SIGHUP and the end of the foreground command stop the run gracefully, SIGINT kills."""

    scheduler = "local"

    def __init__(self, run: RunDir, is_wanted: Callable[[], bool] = lambda: False) -> None:
        self.id = str(os.getpid())
        self.run = run
        self._is_wanted = is_wanted
        """Whether anybody waits for what the run has."""
        self.makes_room = False
        """Whether the run was preempted, and is to give back what it has until it is its turn again."""
        self.signals = 0
        """How often it was told to stop: the second time kills."""
        self._foreground_pipe = int(os.environ[FOREGROUND_PIPE]) if FOREGROUND_PIPE in os.environ else None

    def listen(self) -> None:
        """Take signals from here on: before the lock is held that tells others whom to signal."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 2 if number == signal.SIGINT else 1  # what follows from it happens in the loop, not here

    def stop_request(self) -> StopRequest | None:
        if self._has_lost_command():
            self.signals += 1  # as if it had asked to stop
        if not self.signals:
            return None
        return StopRequest(cause="user", grace=None if self.signals == 1 else 0)

    def stops_waiting(self) -> bool:
        """Whether a run that waits for its turn has been told to stop; that its command is gone is no reason: it goes
        on in the background."""
        self._has_lost_command()
        return self.signals > 0

    def _has_lost_command(self) -> bool:
        """Whether the foreground command is gone since the last look: a closed terminal, a kill -9."""
        if self._foreground_pipe is None or not select.select([self._foreground_pipe], [], [], 0)[0]:
            return False
        os.close(self._foreground_pipe)
        self._foreground_pipe = None
        return True

    def leaves_no_time(self) -> bool:
        return False  # nobody ends this process but its signals

    def time_limit(self) -> TimeLimit:
        return LocalTimeLimit(self.run.config().resources)

    def record(self) -> None:
        return None  # no scheduler knows more

    def waited_for_scheduler(self) -> bool:
        return False

    def look(self, action: Callable[[], None]) -> None:
        action()

    def until_mounted(self, action: Callable[[], T]) -> T:
        return action()  # a disk of this machine is not waited for: the user is there to mend it

    def give_up(self, error: OSError) -> int:
        if isinstance(error, RunRemoved):
            log.warning("%s: it has ended", error.strerror)
            clear_up(self.run)
            return EXIT_FAILED
        log.warning("%s cannot go on: %s; the same command continues it", self.run.name, error)
        return EXIT_RESUMABLE

    def keeps_nodes(self, record: slurm.JobInfo | None) -> bool:
        return not self.signals

    def can_replace(self, record: slurm.JobInfo | None, nodes: Sequence[str]) -> bool:
        return False

    def leave(self, decision: Decision, *, now: bool) -> int | None:
        """Go on in this process, unless the run has ended or a signal came meanwhile; after a preemption in line behind
        those who wait for what the run has."""
        if decision.action == "stop" or self.signals:
            state = self.run.status().state
            return {State.FINISHED: EXIT_FINISHED, State.FAILED: EXIT_FAILED}.get(state, EXIT_RESUMABLE)
        event = Event.RESTARTED if decision.action == "in_place" else Event.REQUEUED
        self.run.record(event, job_id=self.id, cause=decision.reason)
        self.makes_room = decision.reason == "preempted" and self._is_wanted()
        return EXIT_RESUMABLE if self.makes_room else None
