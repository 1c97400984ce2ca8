"""A run that waits and has a higher priority than others of the same user which run: these make room for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import JobkitError
from jobkit.log import log
from jobkit.run import processes
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.silent import is_silent
from jobkit.run.status import State, Status
from jobkit.supervisor.attempt import request_stop
from jobkit.supervisor.lock_files import Holder, holders, is_free
from jobkit.supervisor.needs import Need

LOOK_SECONDS = 2.0
"""How often the runs that have the devices are looked at: their journals are read for it."""


@dataclass(frozen=True)
class Running:
    """A run of this user's that may be preempted."""

    run: RunDir
    status: Status


class Preemption:
    """Asks runs of a lower priority, and of this user only, to write a checkpoint and to get into the line again."""

    def __init__(self, need: Need, priority: int) -> None:
        self.need = need
        self.priority = priority
        self._asked: set[tuple[Path, int]] = set()
        """Run directories and attempts."""
        self._look_at = 0.0

    def make_room(self) -> None:
        """Ask as few as will do, the lowest priority first; none where all of them would not do."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        for one in self._chosen():
            attempt = one.status.attempts[-1].id
            if (one.run.path, attempt) not in self._asked:
                self._asked.add((one.run.path, attempt))
                log.info("%s has a lower priority: it is asked to make room", one.run.name)
                request_stop(one.run, attempt, StopRequest(cause="preempted"))

    def _chosen(self) -> list[Running]:
        users = {lock: holders(lock) for pool in self.need.waited_for for lock in pool.locks if not is_free(lock)}
        lower = sorted(self._lower(users), key=lambda one: (one.status.priority, -one.status.attempts[-1].started))
        chosen: list[Running] = []
        for one in lower:
            if self._would_do(chosen, users):
                break
            chosen.append(one)
        if not self._would_do(chosen, users):
            return []
        for one in list(chosen):  # what a later one gives may have made it needless
            others = [other for other in chosen if other is not one]
            if self._would_do(others, users):
                chosen = others
        return chosen

    def _would_do(self, chosen: list[Running], users: dict[Path, list[Holder]]) -> bool:
        """Whether enough is free once these have stopped."""
        stopped = {str(one.run.path) for one in chosen}

        def would_be_free(lock: Path) -> bool:
            return lock not in users or (bool(users[lock]) and all(holder.run in stopped for holder in users[lock]))

        return all(sum(map(would_be_free, pool.locks)) >= pool.count for pool in self.need.waited_for)

    def _lower(self, users: dict[Path, list[Holder]]) -> Iterator[Running]:
        """Those who have what is needed. Anybody may sign a lock file: whether a run has it, its own process tells."""
        for signed in {holder for found in users.values() for holder in found}:
            has_one = any(_has_open(signed.pid, lock) for lock, found in users.items() if signed in found)
            if has_one and (status := self._status_of_lower(signed)) is not None:
                yield Running(RunDir(signed.run), status)

    def _status_of_lower(self, signed: Holder) -> Status | None:
        """The status of a run that may be preempted; None for others. A command that jobkit has no checkpoint of may
        not: it would begin again."""
        run = RunDir(signed.run)
        try:
            if run.path.lstat().st_uid != os.geteuid():
                return None
            status, lease = run.status(), run.lease()
            if status.state != State.RUNNING or status.priority >= self.priority or is_silent(run, status):
                return None
            is_its_own = lease is not None and processes.seen_here(lease.process or "") == signed.pid
            return status if is_its_own else None
        except (OSError, JobkitError, ValueError):
            return None


def _has_open(pid: int, lock: Path) -> bool:
    """Whether a process of this user has a file open."""
    try:
        wanted, files = lock.stat(), list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(file.stat(), wanted):
                return True
    return False
