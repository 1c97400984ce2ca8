"""The supervisor of a run: the one loop around its ranks, on Slurm and on this machine.

It begins an attempt, starts the ranks, watches them, ends the attempt, and starts the next one or leaves. What differs
between Slurm and this machine is in the nodes (nodes.py) and in the job (slurm_job.py, local_job.py).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE, JobkitError
from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.supervisor import attempt as attempts
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.cache_keeper import CacheKeeper
from jobkit.supervisor.diagnosis import FirstFailure, has_reported
from jobkit.supervisor.nodes import LaunchError
from jobkit.supervisor.notifier import Notifier
from jobkit.supervisor.parents import ParentError
from jobkit.supervisor.presence import Presence, RunRemoved
from jobkit.supervisor.ranks import KILLED_SECONDS, Ranks
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.time_limit import TimeLimit
from jobkit.supervisor.watchdog import Watch, end_hung

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""How often stop requests and progress are read: each is a request to a file server that all supervisors share."""

WAIT_SECONDS = 0.25
"""How long to wait for something to happen to the ranks before looking at what else may end them."""

KILL_AFTER_FAILURE_SECONDS = 3.0
"""What the ranks beside one that has ended without a word get to write down an error that may have been the first."""

LEARNING_SECONDS = 10.0
"""For how long after the first step the ranks may write down what they have imported."""

PAUSE_SECONDS = 1.0
"""How long to wait after Slurm, or the disk, has not answered: a busy slurmctld is not helped by more questions."""


class Job(Protocol):
    """What the ranks run in: a Slurm job, or this process."""

    id: str
    scheduler: str

    def stop_request(self) -> StopRequest | None:
        """What a user asked for by a signal to this process."""

    def leaves_no_time(self) -> bool:
        """Whether the scheduler is ending the job for good, so that what comes next must be decided at once. Once it is
        so it stays so."""

    def time_limit(self) -> TimeLimit:
        """The time limit of an attempt that begins now."""

    def record(self) -> slurm.JobInfo | None:
        """Slurm's record of the job."""

    def waited_for_scheduler(self) -> bool:
        """Wait until the scheduler answers, or the job's time is over; returns whether that took any time."""

    def look(self, action: Callable[[], None]) -> None:
        """Do what reads the run directory; may return before it is done, and then goes on with it the next time."""

    def until_mounted(self, action: Callable[[], T]) -> T:
        """What `action` returns, which reads and writes the run directory; raises OSError where that is away."""

    def give_up(self, error: OSError) -> int:
        """Do what is right where the run directory is away, so that nothing can be decided; the exit code."""

    def keeps_nodes(self, record: slurm.JobInfo | None) -> bool:
        """Whether the job goes on running, for long enough to start the ranks again; `record` is Slurm's of it."""

    def can_replace(self, record: slurm.JobInfo | None, nodes: Sequence[str]) -> bool | None:
        """Whether another start of the job could have other nodes than these; `record` is Slurm's of it. None where
        Slurm does not answer."""

    def leave(self, decision: Decision, *, now: bool) -> int | None:
        """Carry it out, `now` where nobody else will be able to; the exit code, or None for a next attempt here."""


class Supervisor:
    """Runs the attempts of one run until there is nothing left to run, or the job has to end."""

    def __init__(self, run: RunDir, ranks: Ranks, job: Job) -> None:
        self.run = run
        self.ranks = ranks
        self.job = job
        self.notifier = Notifier(run)
        self._is_leaving = False
        """Whether the scheduler is ending the job for good."""
        self._presence = Presence(run)

    def supervise(self) -> int:
        """All attempts; returns the exit code. Raises NotRunnable where there was nothing to run."""
        try:
            while (request := self.job.stop_request()) is None:
                code = self._run_attempt()
                self.notifier.attempt_ended(goes_on=code is None)
                if code is not None:
                    self.notifier.close(at_once=self._is_leaving)
                    return code
            self.run.record(Event.INTERRUPTED, cause=request.cause)  # it came before there was a rank to tell
            return EXIT_RESUMABLE
        except OSError as error:
            return self.job.give_up(error)
        finally:
            self._presence.close()
            self.ranks.shut_down()

    def _run_attempt(self) -> int | None:
        job = self.job
        begun = job.until_mounted(lambda: attempts.begin(self.run, job_id=job.id, scheduler=job.scheduler))
        self.notifier.attempt_begins()
        with contextlib.closing(self.ranks), CacheKeeper(self.run, begun.number) as keeper:
            begun = replace(begun, environment=begun.environment | keeper.environment(begun.code))
            # Before the ranks start: the imports of the process that forks them are part of the attempt's time.
            watch = AttemptWatch(self.run, begun.number, self.ranks, job, self.notifier, self._presence)
            failed_launch = self._start(begun, watch)
            watch.until_end()
            keeper.end(wait=not watch.was_told and watch.noticed is None and not watch.no_time_is_left)
            self._is_leaving = watch.no_time_is_left
            if watch.no_time_is_left:
                code = job.leave(self._decide(watch, failed_launch), now=True)
                while self.ranks.are_running():  # they may save, in the KillWait that Slurm leaves them
                    self.ranks.wait(WAIT_SECONDS)
                return code
        decision = self._decide(watch, failed_launch)
        code = job.leave(decision, now=False)
        if code is None:
            self._pause(decision.pause)
        return code

    def _start(self, begun: Begun, watch: AttemptWatch) -> FirstFailure | None:
        """Start the ranks; what a node, and not the run, has failed of, where they could not be started."""
        while True:
            try:
                self.ranks.prepare(begun)
                if watch.until_prepared():
                    self.ranks.start(begun)
                return None
            except ParentError as error:
                log.warning("%s: %s", self.run.name, error)
                # srun cannot start anything without Slurm: then no attempt has failed.
                if not self.job.waited_for_scheduler():
                    return self._note_failed_start(begun.number, error)
                self.ranks.close()

    def _note_failed_start(self, number: int, error: ParentError) -> FirstFailure | None:
        """As a crash, unless it is a node's: another attempt may do, and only a few are tried. Not where the job is
        ending anyway."""
        record = self.job.record()
        if record is not None and slurm.stop_cause(record) is not None:
            return None
        if isinstance(error, LaunchError):
            return error.first
        where = self.run.supervisor_log if self.job.scheduler == "local" else self.run.logs(number)
        attempts.request_stop(self.run, number, StopRequest(cause="crashed", error=f"{error} ({where})"))
        return None

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.job.stop_request() is None:
            with contextlib.suppress(JobkitError):
                if self.job.leaves_no_time():
                    return  # the next attempt's first look sees to it
            self.ranks.wait(WAIT_SECONDS)

    def _decide(self, watch: AttemptWatch, failed_launch: FirstFailure | None) -> Decision:
        """Record the end of an attempt and decide what comes next."""
        ended = time.time()
        job = self.job.record()

        def end() -> Decision:
            return attempts.end(
                self.run,
                watch.attempt,
                self.job.id,
                first=failed_launch or self.ranks.cause_of_death(job),
                job=job,
                all_returned=self.ranks.all_returned(),
                told=self.ranks.told(),
                keeps_nodes=lambda without: self.job.keeps_nodes(job) and self.ranks.can_start_again(without),
                can_replace=lambda nodes: self.job.can_replace(job, nodes),
                noticed=watch.noticed or ended,
                last_step=self.ranks.last_step(),
            )

        return self.job.until_mounted(end)


class AttemptWatch:
    """Watches the ranks of one attempt: signals them when they have to stop, and kills them when they cannot."""

    def __init__(
        self, run: RunDir, attempt: int, ranks: Ranks, job: Job, notifier: Notifier, presence: Presence
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.ranks = ranks
        self.job = job
        self.notifier = notifier
        self._presence = presence
        self.limit = job.time_limit()
        self._is_command = bool(run.config().command)
        self.watchdog: Watch | None = None
        self.was_told = False
        """Whether the ranks have been signalled to stop."""
        self._gave_notice = False
        self.no_time_is_left = False
        """Whether the scheduler is ending the job for good: what comes next has to be decided at once."""
        self._killed_at: float | None = None
        self._kill_by = math.inf
        """When ranks that have been told to stop are killed, by the monotonic clock."""
        self.noticed: float | None = None
        """When it was known that the ranks have to be ended, in seconds since the epoch."""
        self._failed_at: float | None = None
        self._learning_until: float | None = None
        self._looked = -math.inf

    def until_prepared(self) -> bool:
        """Wait until the ranks can be started; False where the attempt has to end before that, as by a signal."""
        while not self.ranks.are_prepared():
            self._look_once()
            if self.was_told or self._killed_at is not None or self.no_time_is_left:
                return False
            self.ranks.wait(WAIT_SECONDS)
        return True

    def until_end(self) -> None:
        """Return when all ranks have ended, or when the job leaves no time to wait for that."""
        while self.ranks.are_running() and not self.no_time_is_left:
            self._look_once()
            if self._killed_at is not None and time.monotonic() - self._killed_at > KILLED_SECONDS:
                self.ranks.give_up()
            self.ranks.wait(WAIT_SECONDS)

    def _look_once(self) -> None:
        """Look at all that may end the ranks, and end them."""
        try:
            self.no_time_is_left = self.no_time_is_left or self.job.leaves_no_time()
            if self._killed_at is None and not self.no_time_is_left:  # else nothing is left to do
                self.job.look(self._look)
        except RunRemoved:
            self._kill()  # what they would save has no place
            raise
        except (JobkitError, OSError) as problem:  # Slurm, or the run directory, may be back in the next round
            log.warning("%s", problem)
            time.sleep(PAUSE_SECONDS)

    def _look(self) -> None:
        if request := self.job.stop_request():
            self._stop_ranks(request)
        if self._is_a_rank_dead():
            self._kill()  # the others would wait for it for ever
            return
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._presence.check()
        self.notifier.look()
        # Requests before the watchdog: ranks that save for one give no heartbeat.
        if request := self.run.stop_request(self.attempt):
            self._stop_ranks(request)  # `jobkit preempt`, `jobkit cancel`
        if time.monotonic() >= self._kill_by:
            self._kill()
            return
        if self.limit.is_over(saving=self._is_saving()):
            self._stop_ranks(StopRequest(cause="timeout", grace=0))
        elif self.limit.is_near():
            self._stop_ranks(StopRequest(cause="timeout"))
        elif self._is_silent() and self.limit.gives_notice() and not self._gave_notice:
            self.ranks.signal("USR2")
            self._gave_notice = True
        self._learn()
        self.watchdog = self.watchdog or Watch.of(self.run, self.attempt)
        if error := self.watchdog.look():
            log.warning("%s: %s", self.run.name, error)
            self.noticed = time.time()
            end_hung(self.run, self.attempt, error, self.ranks.signal)
            self._killed_at = time.monotonic()

    def _learn(self) -> None:
        """When the ranks have begun to train: their parents have the time to prepare for the next attempt."""
        progress = self.run.progress() if self._learning_until is None else None
        if progress is not None and progress.attempt == self.attempt and progress.training:
            self._learning_until = time.monotonic() + LEARNING_SECONDS
        if self._learning_until is not None and time.monotonic() < self._learning_until:
            self.ranks.learn()

    def _stop_ranks(self, request: StopRequest) -> None:
        """Tell the ranks to stop, once, and kill them when the grace of the request is over, which may be at once."""
        if request.grace is not None and request.grace > 0:
            self._kill_by = min(self._kill_by, time.monotonic() + request.grace)
        if request.grace != 0 and self.was_told:
            return
        attempts.request_stop(self.run, self.attempt, request)
        if request.grace == 0:
            self._kill()
        else:
            self.ranks.signal("TERM")
        self.was_told = True

    def _kill(self) -> None:
        self.ranks.signal("KILL")
        self._killed_at = self._killed_at or time.monotonic()

    def _is_a_rank_dead(self) -> bool:
        """Whether a rank has failed, and what it failed of is known or will not be."""
        first = self.ranks.first_failure()
        if first is None:
            return False
        self.noticed = self.noticed or time.time()
        self._failed_at = self._failed_at or time.monotonic()
        if first.signal is not None or first.node_lost or has_reported(self.run, self.attempt, first.rank):
            return True
        return time.monotonic() - self._failed_at > KILL_AFTER_FAILURE_SECONDS

    def _is_saving(self) -> bool:
        progress = self.run.progress()
        if progress is not None and progress.attempt == self.attempt:
            return progress.stopping
        return self._is_command  # nobody knows: it may be saving, or be done in a moment

    def _is_silent(self) -> bool:
        """Whether the ranks are a command's that has not reported anything."""
        progress = self.run.progress() if self._is_command else None
        return self._is_command and (progress is None or progress.attempt != self.attempt)
