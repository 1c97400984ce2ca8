"""The ranks of an attempt, on whatever nodes: started, signalled, watched and ended through the nodes' parents."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Protocol

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE
from jobkit.run import records
from jobkit.run.records import Imported
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.diagnosis import FirstFailure, Notice
from jobkit.supervisor.nodes import Nodes
from jobkit.supervisor.parents import Child, Parent, wait_for_any

KILLED_SECONDS = 30.0
"""How long killed ranks may take to end, as those that wait for a disk; then their parent is given up with them."""


class Ranks(Protocol):
    """What the supervisor's loop needs of the ranks of one attempt at a time."""

    def prepare(self, begun: Begun) -> None:
        """Begin with what takes time before the ranks of an attempt can start."""

    def are_prepared(self) -> bool:
        """Whether that is done. Raises ParentError where it cannot be."""

    def start(self, begun: Begun) -> None:
        """Start all ranks of an attempt. Raises ParentError."""

    def wait(self, seconds: float) -> None:
        """Return when something has happened to them, or after so many seconds."""

    def are_running(self) -> bool:
        """Whether any rank has not ended."""

    def signal(self, name: str) -> None:
        """Send a signal, by its name without SIG, to every rank; all but TERM reach what a rank has started, too.

        TERM reaches whoever has a handler for it. USR2 is a notice: only those of its processes get it that have one,
        and `told` is set where any does.
        """

    def first_failure(self) -> FirstFailure | None:
        """The first rank or node that ended as it should not, while others may run."""

    def cause_of_death(self, job: slurm.JobInfo | None) -> FirstFailure | None:
        """The same when all have ended; `job` is Slurm's record."""

    def all_returned(self) -> bool:
        """Whether every rank has ended with exit code 0."""

    def told(self) -> Notice | None:
        """How Slurm has told them to stop; None where it has not."""

    def last_step(self) -> tuple[int, float] | None:
        """How many steps the ranks that have ended had done, and when that was; None where it is not known."""

    def give_up(self) -> None:
        """Leave ranks that do not end to themselves, with their parents."""

    def close(self) -> None:
        """End what is left of the attempt's ranks; their parents stay for the next attempt."""

    def learn(self) -> None:
        """Let the parents import what ranks have imported: the next attempt's need not."""

    def can_start_again(self, without: Sequence[str]) -> bool:
        """Whether enough nodes are left for another attempt, beside some that are not to be used."""

    def shut_down(self) -> None:
        """End the parents, too."""


class ForkedRanks:
    """Ranks that the parents of some nodes fork."""

    def __init__(self, run: RunDir, nodes: Nodes) -> None:
        self.run = run
        self.nodes = nodes
        self._ranks: list[tuple[Parent, Child]] = []
        self._told = False
        """Whether they have been signalled to stop."""
        self._first: FirstFailure | None = None
        self._attempt = 0
        self._is_command = False

    def prepare(self, begun: Begun) -> None:
        self._ranks, self._told, self._first = [], False, None
        self._attempt, self._is_command = begun.number, bool(self.run.config().command)
        self.nodes.prepare(begun)

    def are_prepared(self) -> bool:
        return self.nodes.are_prepared()

    def start(self, begun: Begun) -> None:
        for place in self.nodes.places():
            parent = self.nodes.parent_of(place)
            environment, files = self.nodes.environment_of(place)
            child = parent.begin_fork(
                ("submitit.core.submission:process_job", [str(self.run.submitit)]),
                files,
                environment={**begun.environment, "SUBMITIT_EXECUTOR": "jobkit", **environment},
                inherits=True,
                logs=[str(self.run.rank_log(begun.number, place.rank, stream)) for stream in ("out", "err")],
                slots=self.nodes.slots_of(place),
                place=[place.local_rank, place.local_world_size],
            )
            self._ranks.append((parent, child))
        for parent, child in self._ranks:
            parent.finish_fork(child)

    def wait(self, seconds: float) -> None:
        wait_for_any(self.nodes.parents, seconds)
        for parent in self.nodes.parents:
            parent.update()  # one that is gone would end each wait at once

    def _codes(self) -> list[int | None]:
        """The exit code of each rank, or the negative of the signal that killed it; None where it runs."""
        for parent in self.nodes.parents:
            parent.update()
        return [child.returncode for _, child in self._ranks]

    def are_running(self) -> bool:
        return None in self._codes()

    def signal(self, name: str) -> None:
        self._told = self._told or name in ("TERM", "KILL")
        for parent in self.nodes.parents:
            parent.signal(name, [child for one, child in self._ranks if one is parent])

    def first_failure(self) -> FirstFailure | None:
        """The first node or rank that was found dead; a rank that was killed before one that exited and may have
        missed it."""
        codes = self._codes()
        gone = next((parent for parent, _ in self._ranks if parent.is_gone and not parent.is_given_up), None)
        if gone is not None and (self._first is None or not self._first.node_lost):
            # Also where ranks were seen to fail before: their node was dying, or they missed those on it.
            lost = self.nodes.failure_of_lost(gone)
            if lost is not None and (self._first is None or lost.node_lost):
                self._first = lost
            if self._first is not None or self.nodes.is_asking:
                return None if self.nodes.is_asking else self._first
        if self._first is None:
            # Without their parent they have SIGTERM and save, and nobody knows their exit codes.
            # Exit code 75 and SIGKILL are what was asked for once they have been told to stop.
            told = self._told or gone is not None
            # So is the signal that told them, of which a shell around one that has saved ends.
            asked_for = (EXIT_RESUMABLE, -signal.SIGKILL) if told else self.nodes.codes_of_a_stop
            if not told and EXIT_RESUMABLE in codes and not self._say_by_code():
                asked_for = ()
            notices = {-one.told for one in self.nodes.parents if one.told is not None}
            asked_for = (*asked_for, *([-signal.SIGTERM] if self._told else []), *notices)
            dead = [(code, rank) for rank, code in enumerate(codes) if code and code not in asked_for]
            if dead:
                code, rank = min(dead, key=lambda one: one[0] > 0)
                parent, child = self._ranks[rank]
                by = -code if code < 0 else None
                oom = by == signal.SIGKILL and child.out_of_memory
                self._first = FirstFailure(
                    rank=rank, node=parent.node, signal=by, code=None if by else code, out_of_memory=oom
                )
        return self._first

    def _say_by_code(self) -> bool:
        """Whether exit code 75 says that a rank has stopped as it was told: that of a command which was told nothing,
        and does not report, means what it wants."""
        if not self._is_command or self.told() is not None:
            return True
        progress = self.run.progress()
        return progress is not None and progress.attempt == self._attempt

    def cause_of_death(self, job: slurm.JobInfo | None) -> FirstFailure | None:
        while (first := self.first_failure()) is None and self.nodes.is_asking:
            self.wait(0.05)
        return first

    def all_returned(self) -> bool:
        codes = self._codes()  # none where no rank was started
        return bool(codes) and all(code == 0 for code in codes)

    def told(self) -> Notice | None:
        self._codes()  # it may have arrived with the last of them
        now = time.monotonic()
        notices = (Notice(one.told, now - one.told_at) for one in self.nodes.parents if one.told is not None)
        return next(notices, None)

    def last_step(self) -> tuple[int, float] | None:
        return max((child.last_step for _, child in self._ranks if child.last_step is not None), default=None)

    def close(self) -> None:
        self.nodes.stop_preparing()
        if self.all_returned():
            return  # what they have left running is theirs
        self.first_failure()  # before they are killed: SIGKILL would look like the cause
        self.signal("KILL")
        until = time.monotonic() + KILLED_SECONDS
        while self.are_running() and time.monotonic() < until:
            self.wait(0.05)
        self.give_up()

    def give_up(self) -> None:
        for parent, child in self._ranks:
            if child.returncode is None:
                parent.give_up()
                self.nodes.lose(parent)

    def learn(self) -> None:
        if (known := records.read(Imported, self.run.imported_file)) is not None:
            for parent in self.nodes.parents:
                if parent.has_imported:
                    parent.preload(known.modules)

    def can_start_again(self, without: Sequence[str]) -> bool:
        return self.nodes.can_start_again(without)

    def shut_down(self) -> None:
        self.nodes.shut_down()
