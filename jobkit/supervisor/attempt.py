"""The life of an attempt in the journal: the right to begin it, the reason of its end, the next step.

    ThisJob --take_over--> HeldLease --begin--> AttemptBegan --> (the ranks live) --close--> AttemptEnded --> Decision
                                       ^------------------------ in place ---------------------------------------'

The supervisor calls these; an agent whose supervisor is gone calls `rescue`, which closes too. Each holds the run's
begin lock, and the journal takes events from the holder of the lease alone: a process that has lost it gets LostLease.
loop.py, the agent without a supervisor and worker/foreign_attempt.py call it.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError
from jobkit.run.journal import Journal
from jobkit.run.records import AttemptBegan, Cancelled, Refused, Requeued
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, State, Status
from jobkit.supervisor.closing import REQUESTS, Unsaved, cancel_of, end_attempt, facts_of_lost, facts_of_rescue
from jobkit.supervisor.diagnosis import Facts
from jobkit.supervisor.lease import HeldLease, NotRunnable, ThisJob, way_back
from jobkit.supervisor.retry import Decision, RestartOptions

T = TypeVar("T")

EXIT_RUN_FAILED = 3
"""Exit code of a supervisor whose run has failed: job.sh ends with 1, and starts no other supervisor."""

_EXITS = {"finished": EXIT_FINISHED, "failed": EXIT_RUN_FAILED}


def take_over(run: RunDir, this_job: ThisJob) -> HeldLease:
    """Return the right to write for this job. Raises NotRunnable where the job has nothing to run (any more).

    An open attempt of an earlier job, or of an earlier start of this one, is closed.
    """
    with run.begin_lock():  # a second job of the run may start in the same second
        status, before = Journal(run).status, run.lease()
        decision = _not_carried_out(status, this_job)
        _refuse(status, this_job, decision)
        is_ours = before is not None and (before.token, before.job_id) == (this_job.token, this_job.job_id)
        if before is not None and is_ours and before.restart > this_job.restart:
            raise NotRunnable(f"{run.name}: job {this_job.job_id} was started again, and this start of it is over")
        attempt = status.open_attempt
        is_ours = attempt is not None and this_job.began(attempt)
        held_lease = _take_lease(run, this_job, attempt.number if attempt is not None and is_ours else 0)
        if decision is not None:
            return replace(held_lease, decision=decision)
        if this_job.job is not None and (this_job.job.restarts > this_job.restart or not this_job.job.runs):
            return replace(held_lease, decision=_leave(held_lease))
        if is_ours:
            return replace(held_lease, adopted=attempt)
        if attempt is not None:
            decision = end_attempt(
                held_lease, facts_of_lost(run, attempt, this_job, before), RestartOptions(requeue="requeue")
            )
            if decision.action in ("stop", "fail"):
                raise _over(held_lease.journal.status)
        return held_lease


def begin(held_lease: HeldLease, nodes: list[str], ranks: int, *, is_saved: bool = True) -> int:
    """Journal a new attempt and return its number.

    Raises NotRunnable (cancelled, or submitted again meanwhile), LostLease, and OSError where the disk is full: an
    attempt that is not in the journal does not begin. With `is_saved=False` it raises Unsaved before it journals an end
    while the newest snapshot is in memory alone.
    """
    run, this_job, journal = held_lease.run, held_lease.this_job, held_lease.journal
    with run.begin_lock():
        held_lease.check_lease()
        journal.flush()  # the end of the last attempt may still wait for room on the disk
        journal.refresh()
        _refuse(journal.status, this_job, None)
        is_saved = is_saved or unsaved_step(held_lease) is None
        _checked(run, this_job, run.refuse_foreign, is_saved=is_saved)  # somebody may have written there since
        assert journal.status.open_attempt is None, "the last attempt is not closed"
        if (request := cancel_of(journal.status, run)) is not None:
            if not is_saved:
                raise Unsaved
            journal.append(Cancelled(user=request.user))
            raise _over(journal.status)
        began = _next_attempt(held_lease, nodes, ranks)
        number = began.attempt
        run.logs(number).mkdir(parents=True, exist_ok=True)
        run.ends_folder(number).mkdir(parents=True, exist_ok=True)
        held_lease.write_lease(number)  # before the journal: from here on ranks of an older attempt publish nothing
        for kind in REQUESTS:
            stale = run.request(kind)
            is_open = stale is not None and stale.submission == journal.status.person_submission
            if stale is not None and not (kind == "cancel" and is_open):  # such a cancel came just now
                run.request_file(kind).unlink(missing_ok=True)
        journal.append(began)
        run.failed_starts.unlink(missing_ok=True)  # last: until then the job script counts this start as failed
        return number


def _next_attempt(held_lease: HeldLease, nodes: list[str], ranks: int) -> AttemptBegan:
    this_job, status = held_lease.this_job, held_lease.journal.status
    return AttemptBegan(
        attempt=status.attempt.number + 1 if status.attempt is not None else 1,
        token=this_job.token,
        job_id=this_job.job_id,
        restart=this_job.restart,
        how=_how(this_job, status.attempt, status),
        nodes=nodes,
        ranks=ranks,
        host=socket.gethostname(),
    )


def _how(this_job: ThisJob, last: Attempt | None, status: Status) -> Literal["start", "in place", "requeue", "resume"]:
    if last is None:
        return "start"
    if this_job.began(last):
        return "in place"
    return "resume" if last.submission < status.person_submission else "requeue"


def pause(held_lease: HeldLease) -> float:
    """Return the seconds until the next attempt may begin; a clock that was set back makes them no more."""
    last = held_lease.journal.status.attempt
    ended = last.ended if last is not None and held_lease.this_job.began(last) else None
    if ended is None or ended.next_at is None:
        return 0.0
    return min(ended.next_at - ended.time, ended.next_at - time.time())


def unsaved_step(held_lease: HeldLease, facts: Facts | None = None) -> int | None:
    """Return the step of the newest snapshot that this job's agents may have; None where a checkpoint is as new.

    `facts` are those of an attempt that is still open.
    """
    ends = [attempt.ended for attempt in held_lease.journal.status.attempts if held_lease.this_job.began(attempt)]
    steps = [ended.snapshot_step for ended in (*ends, facts) if ended is not None and ended.snapshot_step is not None]
    newest, durable = max(steps, default=-1), held_lease.run.durable_step()
    return newest if newest > (-1 if durable is None else durable) else None


def close(held_lease: HeldLease, facts: Facts, options: RestartOptions, *, is_saved: bool = True) -> Decision:
    """Journal the end of the open attempt, and return the next step. Harmless to call twice. Raises LostLease.

    A full disk does not raise: the events wait in `held_lease.journal`, whose `flush` is to be tried again. With
    `is_saved=False` it raises Unsaved, as `begin`.
    """
    with held_lease.run.begin_lock():
        held_lease.check_lease()
        held_lease.journal.refresh()
        return end_attempt(held_lease, facts, options, is_saved=is_saved or unsaved_step(held_lease, facts) is None)


def rescue(run: RunDir, this_job: ThisJob, writer: str, dead_node: str | None = None) -> HeldLease | None:
    """Close the attempt of a job whose batch script is gone; None if another process acts, or nothing is to be done.

    An agent calls it, and carries out the `decision` of the HeldLease (requeue, successor). `writer` is the supervisor
    that the agent has known last (Contact.writer): a lease with another word is of a supervisor that lives, or of an
    agent that was first. `dead_node` is the node of the batch script, if it is gone, and not the script alone.
    """
    with run.begin_lock():
        lease = run.lease()
        if lease is None or lease.writer != writer:
            return None
        status = Journal(run).status
        decision = _not_carried_out(status, this_job)
        try:
            _refuse(status, this_job, decision)
            held_lease = _take_lease(run, this_job, lease.attempt)  # its ranks may still save
            if decision is None and status.open_attempt is not None:
                decision = end_attempt(
                    held_lease, facts_of_rescue(this_job, dead_node), RestartOptions(requeue=way_back(this_job.job))
                )
            decision = decision or _leave(held_lease)  # the supervisor died between two attempts, or before the first
        except NotRunnable:
            return None
        return replace(held_lease, decision=decision) if decision.action in ("requeue", "successor") else None


def _refuse(status: Status, this_job: ThisJob, decision: Decision | None) -> None:
    """Raise NotRunnable if this job has nothing to run: Slurm is not asked, whose silence would be no answer."""
    if status.token != this_job.token and (decision is None or decision.action != "successor"):
        raise NotRunnable(f"{status.name}: job {this_job.job_id} begins nothing: the run was submitted again since")
    is_decided = status.attempt is not None and status.attempt.began.token == this_job.token and status.is_over
    if status.state in (State.FINISHED, State.CANCELLED) or is_decided:  # by an earlier supervisor of this job
        raise _over(status)


def _over(status: Status) -> NotRunnable:
    words = f": {status.reason}" if status.reason else ""
    return NotRunnable(f"{status.name} is {status.state}{words}", _EXITS.get(status.state, EXIT_RESUMABLE))


def _take_lease(run: RunDir, this_job: ThisJob, attempt: int) -> HeldLease:
    """Become the one writer. Raises NotRunnable where another user wrote the config, or the job lacks a variable."""
    _checked(run, this_job, run.refuse_foreign)
    try:
        config = run.config() if attempt else _checked(run, this_job, run.config)
    except InputError as error:  # ranks live: they are no reason to give up, and a person may mend the file
        raise OSError(errno.ESTALE, str(error)) from error
    held_lease = HeldLease(run=run, config=config, this_job=this_job, journal=Journal(run, secrets.token_hex(8)))
    held_lease.write_lease(attempt)
    return held_lease


def _checked(run: RunDir, this_job: ThisJob, check: Callable[[], T], *, is_saved: bool = True) -> T:
    """Return the result of a check; raise NotRunnable where a person must submit the run again."""
    try:
        return check()
    except InputError as error:
        if not is_saved:
            raise Unsaved from error
        Journal(run).append(Refused(token=this_job.token, error=str(error)))
        raise NotRunnable(str(error), EXIT_RUN_FAILED) from error


# A job that Slurm is ending


def _not_carried_out(status: Status, this_job: ThisJob) -> Decision | None:
    """Return the decision of an earlier supervisor of this start of the job, if it had to put the run into the queue.

    It was journalled first, because `scontrol requeue` kills its own caller: a supervisor that was killed in between
    has not done it.
    """
    attempt = status.attempt
    if status.state != State.QUEUED or attempt is None or attempt.ended is None or not this_job.began(attempt):
        return None
    if attempt.ended.next not in ("requeue", "successor"):
        return None
    if status.token != this_job.token and status.submitted is not None and status.submitted.by == "person":
        return None  # somebody has submitted the run again since
    return Decision(action=attempt.ended.next, reason=attempt.ended.reason)


def _leave(held_lease: HeldLease) -> Decision:
    """Return how a job that Slurm is ending gets into the queue again. Raises NotRunnable where nothing is to be done.

    Only what Slurm says counts: a supervisor that starts in this moment has seen nothing.
    """
    this_job, journal = held_lease.this_job, held_lease.journal
    word = this_job.slurm_cause()
    if journal.status.open_attempt is None and word == "timeout":  # of setup lines: else it would have no budget
        journal.append(_next_attempt(held_lease, [], 0))
    if journal.status.open_attempt is not None:
        decision = end_attempt(held_lease, Facts(slurm_cause=word), RestartOptions(requeue=way_back(this_job.job)))
    elif word == "cancelled":
        journal.append(Cancelled(reason=f"job {this_job.job_id} was cancelled"))
        raise _over(journal.status)
    else:
        decision = Decision(action=way_back(this_job.job), reason=word or "Slurm ends the job")
        if not this_job.is_requeued() and decision.action == "requeue":
            journal.append(Requeued(job_id=this_job.job_id, reason=decision.reason))
    if this_job.is_requeued() or decision.action not in ("requeue", "successor"):
        raise _over(journal.status)
    return decision
