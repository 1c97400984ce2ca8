"""Ranks, a job and a clock that do what a test says, for what is around the ranks of an attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jobkit import slurm
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run.config import Config
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.diagnosis import FirstFailure, Notice
from jobkit.supervisor.parents import ParentError
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.time_limit import LocalTimeLimit

T = TypeVar("T")


class Clock:
    """A clock that only sleeping puts forward."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.at: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [action for when, action in self.at if when <= self.now]
        self.at = [one for one in self.at if one[0] > self.now]
        for action in due:
            action()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Let something happen so many seconds from now."""
        self.at.append((self.now + seconds, action))


class Ranks:
    """Ranks that run until they are told otherwise: `lives` seconds after TERM, not at all after KILL."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.running = False
        self.prepared: bool | ParentError = True
        self.started: list[int] = []
        self.sent: list[tuple[str, float]] = []
        self.first: FirstFailure | None = None
        self.notice: Notice | None = None
        self.lives = 1.0
        self.refusals = 0
        self.closed = self.ends = self.given_up = 0
        self.can_be_killed = True
        self.on_start: Callable[[], object] = lambda: None

    def prepare(self, begun: Begun) -> None:
        pass

    def are_prepared(self) -> bool:
        if isinstance(self.prepared, bool):
            return self.prepared
        raise self.prepared

    def start(self, begun: Begun) -> None:
        self.started.append(begun.number)
        self.running = True
        self.on_start()

    def are_running(self) -> bool:
        return self.running

    def signal(self, name: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SchedulerError("slurmctld is away")
        self.sent.append((name, round(self.clock.now - 1000.0, 2)))
        if name == "KILL" and self.can_be_killed:
            self.end()
        elif name == "TERM" and math.isfinite(self.lives):
            self.clock.after(self.lives, self.end)

    def end(self) -> None:
        self.running = False

    def first_failure(self) -> FirstFailure | None:
        return self.first

    def cause_of_death(self, job: object) -> FirstFailure | None:
        return self.first

    def all_returned(self) -> bool:
        return False

    def told(self) -> Notice | None:
        return self.notice

    def last_step(self) -> tuple[int, float] | None:
        return None

    def give_up(self) -> None:
        self.given_up += 1
        self.end()

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def close(self) -> None:
        self.closed += 1

    def learn(self) -> None:
        pass

    def can_start_again(self, without: Sequence[str]) -> bool:
        return True

    def shut_down(self) -> None:
        self.ends += 1


class Job:
    """A job that leaves after its first attempt, unless `attempts` says otherwise."""

    id = "7"
    scheduler = "local"

    def __init__(self, attempts: int = 1) -> None:
        self.attempts = attempts
        self.request: StopRequest | None = None
        self.no_time = False
        self.limit: Any = LocalTimeLimit(Config(name="toy", task="m:f").resources)
        self.left: list[tuple[str, bool]] = []

    def stop_request(self) -> StopRequest | None:
        return self.request

    def leaves_no_time(self) -> bool:
        return self.no_time

    def time_limit(self) -> Any:
        return self.limit

    def record(self) -> slurm.JobInfo | None:
        return None

    def waited_for_scheduler(self) -> bool:
        return False

    def look(self, action: Callable[[], None]) -> None:
        action()

    def until_mounted(self, action: Callable[[], T]) -> T:
        return action()

    def give_up(self, error: OSError) -> int:
        self.left.append((str(error), False))
        return EXIT_RESUMABLE

    def keeps_nodes(self, record: object) -> bool:
        return False

    def can_replace(self, record: object, nodes: Sequence[str]) -> bool:
        return True

    def leave(self, decision: Decision, *, now: bool) -> int | None:
        self.left.append((decision.reason, now))
        return EXIT_FINISHED if len(self.left) >= self.attempts else None


def info(**known: Any) -> slurm.JobInfo:
    """Slurm's record of the job."""
    fields = {"state": "RUNNING", "reason": "", "preempt_time": None, "start": 0.0, "end": 100.0, "elapsed": 0.0}
    return slurm.JobInfo(**{"job_id": "7", "restarts": 0, "nodes": "node1", **fields, **known})


def causes(run: RunDir) -> list[str | None]:
    return [attempt.cause for attempt in run.status().attempts]
