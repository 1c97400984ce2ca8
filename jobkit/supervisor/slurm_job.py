"""The Slurm job that a supervisor runs in: why Slurm ends it, and how it is started again.

Slurm and the run directory may be away for minutes, and this process may be killed at any line.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from jobkit import slurm
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.log import log
from jobkit.run.continuation import how_to_continue
from jobkit.run.disk_errors import FULL
from jobkit.run.events import Event
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.supervisor.attempt import ask, end, notice_margin, request_stop
from jobkit.supervisor.batch_script import BLIND_RESTARTS, EXIT_START_AGAIN
from jobkit.supervisor.dependents import tell_dependents
from jobkit.supervisor.diagnosis import FirstFailure, first_failure_of_job, srun_said_about
from jobkit.supervisor.nodes import end_steps
from jobkit.supervisor.placement import nodes_to_use
from jobkit.supervisor.presence import Presence, RunRemoved, clear_up
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.time_limit import SlurmTimeLimit, TimeLimit

T = TypeVar("T")

MOUNT_SECONDS = 300.0
"""How long the beginning and the end of an attempt wait for a file server: a restart takes it minutes."""

ANSWER_SECONDS = 1.0
"""How long to wait for a file server before looking again whether srun has ended, or Slurm is ending the job."""

SAVE_SECONDS = 10.0
"""How long ranks whose supervisor was killed may take to save before they are killed, as they may hang."""

LOST_SECONDS = 600.0
"""How long what we know of a lost node counts: Slurm knows better after SlurmdTimeout, 300 s by default."""

SLURM_PAUSES = (0.0, 2.0, 10.0, 30.0, 60.0)
"""Seconds before each try to reach a controller that is away; the last again and again, until the job's time is over.
A restart of it takes a minute or two, an upgrade longer; meanwhile nobody takes the nodes either."""

RECORD_SECONDS = 15.0
"""What is left of the job's time to record in that it could not be started again."""

REFUSAL_PAUSES = (10.0, 20.0)
"""Seconds between the tries to write to a disk that refuses it: all of the job's nodes wait."""

REFUSES = FULL | {errno.EACCES, errno.EPERM}
"""What stays so until a person makes room or gives the right to write, unlike a file server that is away."""

ASK_SECONDS = 10.0
"""How long to wait before asking a Slurm again that did not answer: meanwhile the ranks are looked after."""

QUICK_SECONDS = 5.0
"""How long Slurm may take to answer while ranks run, which nobody looks after meanwhile."""


class SlurmJob:
    """The job of the batch script that started this process."""

    scheduler = "slurm"

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.id = job_id
        self.run = run
        self._reading: Future[None] | None = None
        self._script = os.getppid()
        """The batch script's process, as long as it lives."""
        self._signalled = True  # a signal may have come before there was anyone to take it
        self._asks_at = -math.inf
        self._ends: float | None = None
        """When the time of this start of the job is over, as Slurm said last, by this node's clock."""
        self._began = time.time()

    def listen(self) -> None:
        """Take SIGTERM from here on: Slurm sends it to every process of the batch step when it ends the job."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def stop_request(self) -> StopRequest | None:
        """None: the ranks get Slurm's signals themselves, and ask Slurm why."""
        return None

    def leaves_no_time(self) -> bool:
        """Whether Slurm is ending the job for good, though its owner did not cancel it; not where it does not answer.

        srun may wait for ranks that take long to save; KillWait after its SIGTERM Slurm kills this process too.
        """
        if not self._signalled or time.monotonic() < self._asks_at:
            return False
        self._signalled = False  # before the question: a signal that comes meanwhile asks again
        try:
            job = self._see(slurm.show_job(self.id, QUICK_SECONDS))
        except SchedulerError as error:
            log.warning("%s", error)
            self._signalled, self._asks_at = True, time.monotonic() + ASK_SECONDS
            return False
        ends = job is not None and job.state == "COMPLETING" and slurm.stop_cause(job) != "cancelled"
        self._signalled = self._signalled or ends
        return ends

    def time_limit(self) -> TimeLimit:
        return SlurmTimeLimit(self.run, self.id)

    def record(self) -> slurm.JobInfo | None:
        return self._see(ask(self.id))

    def _see(self, job: slurm.JobInfo | None) -> slurm.JobInfo | None:
        if job is not None:
            self._ends = math.inf if job.remaining is None else time.time() + job.remaining
        return job

    def waited_for_scheduler(self) -> bool:
        for number, _ in enumerate(self._tries()):
            if self.record() is not None:
                return number > 0
        return False

    def _tries(self) -> Iterator[None]:
        """Wait before each try to reach Slurm, at first a moment and then longer and longer, until the job's time is
        over; a few tries are made in any case."""
        for number in itertools.count():
            pause = SLURM_PAUSES[min(number, len(SLURM_PAUSES) - 1)]
            if number > len(SLURM_PAUSES) and self._seconds_left() < pause + RECORD_SECONDS:
                return
            time.sleep(pause)
            yield

    def _seconds_left(self) -> float:
        """Of the job's time, as Slurm or the YAML has said: Slurm is not asked."""
        ends = self._ends
        if ends is None:
            with contextlib.suppress(OSError):
                ends = self._began + self.run.config().resources.seconds
        return math.inf if ends is None else ends - time.time()

    def look(self, action: Callable[[], None]) -> None:
        """Do what reads the run directory; returns before that is done where the file server does not answer."""
        reading = self._reading = self._reading or in_thread(action)
        if wait([reading], ANSWER_SECONDS).done:
            self._reading = None
            reading.result()

    def until_mounted(self, action: Callable[[], T]) -> T:
        """What `action` returns, which is tried until the run directory is there: a file server may be restarting."""
        return retry_until_mounted(self.run, action)

    def give_up(self, error: OSError) -> int:
        """Put the job into the queue again, a limited number of times: its next start looks for the directory.

        It may be this node's mount alone, and with nothing on the disk to read nothing can be decided here. A directory
        that was removed does not come back: its job ends.
        """
        if isinstance(error, RunRemoved):
            log.warning("%s: its job ends", error.strerror)
            with contextlib.suppress(SchedulerError):  # where to look for the reason: the logs are gone, too
                slurm.comment(self.id, f"jobkit: {error.strerror}")
            clear_up(self.run)
            return EXIT_RESUMABLE
        if error.errno in REFUSES:
            return self._stop_for_disk(error)
        log.warning("%s: the run directory is away (%s); starting again to look for it", self.run.name, error)
        if int(os.environ.get("SLURM_RESTART_COUNT") or 0) >= BLIND_RESTARTS:
            return EXIT_RESUMABLE
        for _ in self._tries():
            try:
                slurm.requeue(self.id)
                return EXIT_FINISHED
            except SchedulerError as problem:
                log.warning("%s", problem)
                if isinstance(problem, slurm.Refused):
                    break
        return EXIT_RESUMABLE

    def _stop_for_disk(self, error: OSError) -> int:
        """End the job: another start of it would wait for the same person."""
        command = "the same command"
        with contextlib.suppress(OSError):
            command = how_to_continue(self.run, self.run.status())
        words = f"cannot write to the run directory: {error}; make room, or mend the permissions, and type: "
        log.warning("%s: %s%s", self.run.name, words, command)
        self._try_record(Event.REQUEUE_FAILED, job_id=self.id, error=f"{words}{command}")
        return EXIT_RESUMABLE

    def keeps_nodes(self, record: slurm.JobInfo | None) -> bool:
        if record is None:  # Slurm is away, and could not start the job again either
            return not self._signalled
        if record.state != "RUNNING" or record.limit is None:
            return False
        # An attempt that would be stopped before it has done more than the last one repeats is a waste.
        status = self.run.status()
        needed = slurm.stop_margin(record.limit) + status.seconds_to_progress
        if self.run.config().command and (status.attempt is None or status.attempt.resumed is None):
            needed = notice_margin(self.run, record.limit)  # it would be ended without a notice
        return slurm.stop_cause(record, needed) is None

    def can_replace(self, record: slurm.JobInfo | None, nodes: Sequence[str]) -> bool | None:
        if record is None:
            return None
        try:
            if self._are_enough_without(record, self._excluded_with(record, nodes)):
                return True
        except SchedulerError as error:
            log.warning("%s", error)
            return None
        log.warning("%s: too few nodes beside %s", self.run.name, ", ".join(nodes))
        return False

    def leave(self, decision: Decision, *, now: bool) -> int | None:
        """The exit code for the batch script, None for a restart in place; `now`: the job is requeued before that."""
        now = now or os.getppid() != self._script  # nobody is left to take an exit code from
        if decision.action == "in_place" and not now:
            self._try_record(Event.RESTARTED, job_id=self.id, cause=decision.reason)
            return None
        if decision.action != "stop":
            return self._start_again(decision) if now else EXIT_START_AGAIN
        log.info("%s: %s: not started again", self.run.name, decision.reason)
        state = self.run.status().state
        return {State.INTERRUPTED: EXIT_RESUMABLE, State.FAILED: EXIT_FAILED}.get(state, EXIT_FINISHED)

    def finish(self, number: int | None = None) -> int:
        """End the newest attempt where its supervisor has not, and carry out what follows; harmless to call twice.

        `number` is the attempt of a parent that calls this: it leaves the job's steps alone, of which it is one.
        LookupError where no attempt of this job is known.
        """
        job = self.record()
        try:
            decision = self.until_mounted(lambda: self._end(number, job))
        except OSError as error:
            return self.give_up(error)
        return self.leave(decision, now=True) or EXIT_FINISHED

    def _end(self, number: int | None, job: slurm.JobInfo | None) -> Decision:
        by_parent = number is not None
        number = number or self.run.owner()
        attempts = self.run.status().attempts
        attempt = next((one for one in attempts if one.id == number), None)
        if number is None or attempt is None or attempt.job_id != self.id:
            raise LookupError(f"{self.run.name} has no attempt of job {self.id}")
        said = srun_said_about(self.run, attempts, number)  # before what is still running is killed
        slurm_ends_them = job is not None and job.state != "RUNNING"  # and leaves them KillWait to save
        if attempt.ended is None and not by_parent and not slurm_ends_them:  # a supervisor that ends it ends the steps
            with contextlib.suppress(SchedulerError):  # starting again waits for a Slurm that is away
                if not said and slurm.steps(self.id):
                    request_stop(self.run, number, StopRequest(cause="killed", error="the supervisor was killed"))
                    self._wait_for_save(number)
            end_steps(self.id)
        first = first_failure_of_job(said, job, attempt.nodes)
        lease = self.run.lease()
        if by_parent and lease is not None and lease.node and not (first is not None and first.node_lost):
            with contextlib.suppress(SchedulerError):  # of the supervisor's node, Slurm may not know yet
                if slurm.takes_no_jobs(lease.node):
                    first = FirstFailure(node=lease.node, node_lost=True)
        can_replace = partial(self.can_replace, job)
        return end(self.run, number, self.id, first=first, job=job, can_replace=can_replace)

    def _wait_for_save(self, number: int) -> None:
        """Give ranks that have lost their supervisor, and are told so by their parents, the time to save."""
        until = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < until and slurm.steps(self.id):
            if any(one.id == number and one.ended for one in self.run.status().attempts):
                return
            time.sleep(0.5)

    # Starting again

    def _start_again(self, decision: Decision) -> int:
        """Requeue the job, or where Slurm refuses let a new one follow it."""
        refused = decision.action == "resubmit"
        status = self.run.status()  # with what this start of the job has lost: the journal's next line ends that
        # Journalled first: from the moment Slurm agrees, this process may be killed at any line.
        self._try_record(Event.REQUEUED, job_id=self.id, cause=decision.reason)
        problem = None
        for number, _ in enumerate(self._tries()):
            try:
                # Slurm may have put the job back itself, or its owner may have cancelled it, since the last look.
                job = self._see(slurm.show_job(self.id))
                if job is None or not job.requeued_by_slurm:
                    cancelled = job is not None and slurm.stop_cause(job) == "cancelled"  # since the decision
                    fewer_nodes = self._fewer_nodes(job, status)
                    if (refused or fewer_nodes is not None) and not cancelled:
                        self._resubmit(fewer_nodes, job)
                        return EXIT_FINISHED
                    if cancelled or not slurm.requeue(self.id):
                        self._try_record(Event.CANCELLED)  # a requeue would undo the scancel
                        log.info("%s: cancelled: not started again", self.run.name)
                        return EXIT_FINISHED
                self._exclude(job)  # after the requeue: Slurm takes ExcNodeList for a job in the queue only
                return EXIT_FINISHED
            except slurm.Refused as error:
                log.warning("%s: %s; a new job will follow this one", self.run.name, error)
                refused = True
            except (SchedulerError, OSError) as error:
                problem = str(error)
                log.warning("%s: %s", self.run.name, problem)
                if isinstance(error, SchedulerError) and not slurm.is_away(error) and number >= len(SLURM_PAUSES):
                    break  # it has answered, again and again
        self._try_record(Event.REQUEUE_FAILED, job_id=self.id, error=problem)
        log.warning("%s: not started again; the same command continues it", self.run.name)
        return EXIT_RESUMABLE

    def _try_record(self, event: Event, **fields: object) -> None:
        """Journal an event, unless the run directory is away just now: what is being recorded matters more."""
        try:
            self.run.record(event, **fields)
        except OSError as error:
            log.warning("%s: the journal does not take %r: %s", self.run.name, event.value, error)

    def _exclude(self, job: slurm.JobInfo | None) -> None:
        """Keep the job, which is in the queue by now, off the nodes that failed under it too often."""
        nodes = self.run.status().excluded_nodes
        if nodes and (listed := self._to_exclude(job, nodes)):
            slurm.exclude(self.id, ",".join(listed))
            log.info("%s: excluded from here on: %s", self.run.name, ", ".join(nodes))

    def _to_exclude(self, job: slurm.JobInfo | None, nodes: Sequence[str]) -> list[str]:
        """Some nodes, and those that the job may not get; none where too few others would be left: a job that no node
        is left for would stay in the queue for ever."""
        listed = self._excluded_with(job, nodes)
        if nodes and job and not self._are_enough_without(job, listed):
            names = ", ".join(nodes)
            log.warning("%s: not excluded, too few nodes of %s would be left: %s", self.run.name, job.partition, names)
            return []
        return listed

    def _excluded_with(self, job: slurm.JobInfo | None, nodes: Sequence[str]) -> list[str]:
        """Some nodes, and those that the job may not get, as by the user's own `exclude`: a list replaces the other."""
        listed = [*([job.excluded] if job is not None and job.excluded else []), *nodes]
        return slurm.expand(",".join(listed)) if listed else []

    def _are_enough_without(self, job: slurm.JobInfo, nodes: Sequence[str]) -> bool:
        """Whether there are enough nodes besides some for the job to start on. Raises SchedulerError."""
        if job.partition and slurm.nodes_left(job.partition, nodes) < self.run.config().resources.nodes:
            return False
        # Others of the partition may not have what the job wants, as a feature.
        options = [f"--exclude={','.join(nodes)}", *self._only_own_task()]
        return slurm.could_start(str(self.run.batch_script), *options, environment=_own_variables())

    def _only_own_task(self) -> list[str]:
        """What sbatch needs to take the batch script of a job array for this run alone."""
        task = self.run.array_task
        return [] if task is None else [f"--array={task}"]

    def _fewer_nodes(self, job: slurm.JobInfo | None, status: Status) -> int | None:
        """How many nodes to ask for where the job would wait for more for ever, as for spares; None for all."""
        config = self.run.config()
        resources = config.resources
        with contextlib.suppress(SchedulerError):
            partition = os.environ.get("SLURM_JOB_PARTITION", "")
            lost = [node for node, when in status.lost_nodes.items() if time.time() - when < LOST_SECONDS]
            left = slurm.nodes_left(partition, self._excluded_with(job, [*status.excluded_nodes, *lost]))
            fewer = nodes_to_use(config, left)
            asked = int(os.environ.get("SLURM_JOB_NUM_NODES") or 0)
            if lost and fewer and left < resources.nodes + resources.spares and fewer < asked:
                log.warning("%s: only %d nodes are left: a new job goes on with %d", self.run.name, left, fewer)
                return fewer
        return None

    def _resubmit(self, nodes: int | None, job: slurm.JobInfo | None) -> None:
        """Submit the run's batch script again, to start when this job has ended; on so many nodes, where given."""
        # One may be there already: its sbatch gave no answer, or this is the second try to end the attempt.
        task = self.run.array_task
        successor = next((one for one in slurm.jobs_with(self.run.batch_script, task) if one != self.id), None)
        if successor is None:
            options = [f"--dependency=afterany:{self.id}"]
            # `nodes` are left beside the excluded ones: that has been counted.
            excluded = self.run.status().excluded_nodes
            if exclude := self._to_exclude(job, excluded) if nodes is None else self._excluded_with(job, excluded):
                options += [f"--exclude={','.join(exclude)}"]
            if nodes is not None:
                options += [f"--nodes={nodes}"]
            successor = self.submit_again(*options)
        self._try_record(Event.REQUEUED, job_id=successor, cause="resubmitted", predecessor=self.id)
        tell_dependents(self.run)  # else they would start when this job has ended, and go back
        log.info("%s: job %s continues it", self.run.name, successor)

    def submit_again(self, *options: str) -> str:
        """Submit the run's batch script as another job, with some options of sbatch's; returns its id."""
        successor = slurm.submit(
            str(self.run.batch_script), *options, *self._only_own_task(), environment=_own_variables()
        )
        return successor if self.run.array_task is None else slurm.task_id(successor, self.run.array_task)


def _own_variables() -> dict[str, str]:
    """The environment without what belongs to this job's attempt: sbatch hands it on to the next job."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("JOBKIT_", "SUBMITIT_"))}


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Do something in a thread, since a file server that is gone does not answer at all: the caller keeps the time."""
    outcome: Future[T] = Future()

    def act() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=act, daemon=True).start()  # Python would wait at its end for an executor's threads
    return outcome


def retry_until_mounted(run: RunDir, action: Callable[[], T]) -> T:
    """What `action` returns, tried until the run directory is there; raises the last OSError after MOUNT_SECONDS, the
    third by which the disk refuses to be written to, or RunRemoved."""
    problem = OSError(f"{run.path} does not answer")

    def try_it() -> T:
        nonlocal problem
        pauses, presence = iter(REFUSAL_PAUSES), Presence(run)
        while True:
            try:
                with contextlib.closing(presence):
                    presence.check()
                if not run.exists():
                    raise FileNotFoundError(f"{run.config_file}: not there")
                return action()
            except RunRemoved:
                raise
            except OSError as error:
                problem = error
                if error.errno not in REFUSES:
                    time.sleep(1.0)
                elif (pause := next(pauses, None)) is not None:
                    log.warning("%s: %s; trying again in %g s", run.name, error, pause)
                    time.sleep(pause)
                else:
                    raise

    trying = in_thread(try_it)
    if not wait([trying], MOUNT_SECONDS).done:
        raise problem
    return trying.result()
