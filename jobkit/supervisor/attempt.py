"""The life of an attempt in the journal: the right to begin it, the reason of its end, the next step.

    ThisJob --take_over--> HeldLease --begin--> AttemptBegan --> (the ranks live) --close--> AttemptEnded --> Decision
                                       ^------------------------ in place ---------------------------------------'

The supervisor calls these; an agent whose supervisor is gone calls `rescue`, which closes too. Each holds the run's
begin lock, and the journal takes events from the holder of the lease alone: a process that has lost it gets LostLease.
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
from jobkit.run.status import Attempt, Status
from jobkit.supervisor.closing import REQUESTS, Unsaved, cancel_of, end_attempt, facts_of_lost, facts_of_rescue
from jobkit.supervisor.diagnosis import Facts
from jobkit.supervisor.lease import HeldLease, NotRunnable, ThisJob, way_back
from jobkit.supervisor.retry import Decision, RestartOptions

T = TypeVar("T")

EXIT_RUN_FAILED = 3
"""Exit code of a supervisor whose run has failed: job.sh ends with 1, and starts no other supervisor."""

_EXITS = {"finished": EXIT_FINISHED, "failed": EXIT_RUN_FAILED}


def take_over(run: RunDir, me: ThisJob) -> HeldLease:
    """Return the right to write for this job. Raises NotRunnable where the job has nothing to run (any more).

    An open attempt of an earlier job, or of an earlier start of this one, is closed.
    """
    with run.begin_lock():  # a second job of the run may start in the same second
        status, before = Journal(run).status, run.lease()
        decision = _not_carried_out(status, me)
        _refuse(status, me, decision)
        is_ours = before is not None and (before.token, before.job_id) == (me.token, me.job_id)
        if before is not None and is_ours and before.restart > me.restart:
            raise NotRunnable(f"{run.name}: job {me.job_id} was started again, and this start of it is over")
        attempt = status.open_attempt
        is_ours = attempt is not None and me.began(attempt)
        tenure = _take_lease(run, me, attempt.number if attempt is not None and is_ours else 0)
        if decision is not None:
            return replace(tenure, decision=decision)
        if me.job is not None and (me.job.restarts > me.restart or not me.job.runs):
            return replace(tenure, decision=_leave(tenure))
        if is_ours:
            return replace(tenure, adopted=attempt)
        if attempt is not None:
            decision = end_attempt(tenure, facts_of_lost(run, attempt, me, before), RestartOptions(requeue="requeue"))
            if decision.action in ("stop", "fail"):
                raise _over(tenure.journal.status)
        return tenure


def begin(tenure: HeldLease, nodes: list[str], ranks: int, *, is_saved: bool = True) -> int:
    """Journal a new attempt and return its number.

    Raises NotRunnable (cancelled, or submitted again meanwhile), LostLease, and OSError where the disk is full: an
    attempt that is not in the journal does not begin. With `is_saved=False` it raises Unsaved before it journals an end
    while the newest snapshot is in memory alone.
    """
    run, me, journal = tenure.run, tenure.me, tenure.journal
    with run.begin_lock():
        tenure.check_lease()
        journal.flush()  # the end of the last attempt may still wait for room on the disk
        journal.refresh()
        _refuse(journal.status, me, None)
        is_saved = is_saved or unsaved_step(tenure) is None
        _checked(run, me, run.refuse_foreign, is_saved=is_saved)  # somebody may have written there since
        assert journal.status.open_attempt is None, "the last attempt is not closed"
        if (request := cancel_of(journal.status, run)) is not None:
            if not is_saved:
                raise Unsaved
            journal.append(Cancelled(user=request.user))
            raise _over(journal.status)
        began = _next_attempt(tenure, nodes, ranks)
        number = began.attempt
        run.logs(number).mkdir(parents=True, exist_ok=True)
        run.ends_folder(number).mkdir(parents=True, exist_ok=True)
        tenure.write_lease(number)  # before the journal: from here on ranks of an older attempt publish nothing
        for kind in REQUESTS:
            stale = run.request(kind)
            is_open = stale is not None and stale.submission == journal.status.person_submission
            if stale is not None and not (kind == "cancel" and is_open):  # such a cancel came just now
                run.request_file(kind).unlink(missing_ok=True)
        journal.append(began)
        run.failed_starts.unlink(missing_ok=True)  # last: until then the job script counts this start as failed
        return number


def _next_attempt(tenure: HeldLease, nodes: list[str], ranks: int) -> AttemptBegan:
    me, status = tenure.me, tenure.journal.status
    return AttemptBegan(
        attempt=status.attempt.number + 1 if status.attempt is not None else 1,
        token=me.token,
        job_id=me.job_id,
        restart=me.restart,
        how=_how(me, status.attempt, status),
        nodes=nodes,
        ranks=ranks,
        host=socket.gethostname(),
    )


def _how(me: ThisJob, last: Attempt | None, status: Status) -> Literal["start", "in place", "requeue", "resume"]:
    if last is None:
        return "start"
    if me.began(last):
        return "in place"
    return "resume" if last.submission < status.person_submission else "requeue"


def pause(tenure: HeldLease) -> float:
    """Return the seconds until the next attempt may begin; a clock that was set back makes them no more."""
    last = tenure.journal.status.attempt
    ended = last.ended if last is not None and tenure.me.began(last) else None
    if ended is None or ended.next_at is None:
        return 0.0
    return min(ended.next_at - ended.time, ended.next_at - time.time())


def unsaved_step(tenure: HeldLease, facts: Facts | None = None) -> int | None:
    """Return the step of the newest snapshot that this job's agents may have; None where a checkpoint is as new.

    `facts` are those of an attempt that is still open.
    """
    ends = [attempt.ended for attempt in tenure.journal.status.attempts if tenure.me.began(attempt)]
    steps = [ended.snapshot_step for ended in (*ends, facts) if ended is not None and ended.snapshot_step is not None]
    newest, durable = max(steps, default=-1), tenure.run.durable_step()
    return newest if newest > (-1 if durable is None else durable) else None


def close(tenure: HeldLease, facts: Facts, room: RestartOptions, *, is_saved: bool = True) -> Decision:
    """Journal the end of the open attempt, and return the next step. Harmless to call twice. Raises LostLease.

    A full disk does not raise: the events wait in `tenure.journal`, whose `flush` is to be tried again. With
    `is_saved=False` it raises Unsaved, as `begin`.
    """
    with tenure.run.begin_lock():
        tenure.check_lease()
        tenure.journal.refresh()
        return end_attempt(tenure, facts, room, is_saved=is_saved or unsaved_step(tenure, facts) is None)


def rescue(run: RunDir, me: ThisJob, writer: str, dead_node: str | None = None) -> HeldLease | None:
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
        decision = _not_carried_out(status, me)
        try:
            _refuse(status, me, decision)
            tenure = _take_lease(run, me, lease.attempt)  # its ranks may still save
            if decision is None and status.open_attempt is not None:
                decision = end_attempt(tenure, facts_of_rescue(me, dead_node), RestartOptions(requeue=way_back(me.job)))
            decision = decision or _leave(tenure)  # the supervisor died between two attempts, or before the first
        except NotRunnable:
            return None
        return replace(tenure, decision=decision) if decision.action in ("requeue", "successor") else None


def _refuse(status: Status, me: ThisJob, decision: Decision | None) -> None:
    """Raise NotRunnable if this job has nothing to run: Slurm is not asked, whose silence would be no answer."""
    if status.token != me.token and (decision is None or decision.action != "successor"):
        raise NotRunnable(f"{status.name}: job {me.job_id} begins nothing: the run was submitted again since")
    is_decided = status.attempt is not None and status.attempt.began.token == me.token and status.is_over
    if status.state in ("finished", "cancelled") or is_decided:  # by an earlier supervisor of this job
        raise _over(status)


def _over(status: Status) -> NotRunnable:
    words = f": {status.reason}" if status.reason else ""
    return NotRunnable(f"{status.name} is {status.state}{words}", _EXITS.get(status.state, EXIT_RESUMABLE))


def _take_lease(run: RunDir, me: ThisJob, attempt: int) -> HeldLease:
    """Become the one writer. Raises NotRunnable where another user wrote the config, or the job lacks a variable."""
    _checked(run, me, run.refuse_foreign)
    try:
        config = run.config() if attempt else _checked(run, me, run.config)
    except InputError as error:  # ranks live: they are no reason to give up, and a person may mend the file
        raise OSError(errno.ESTALE, str(error)) from error
    tenure = HeldLease(run=run, config=config, me=me, journal=Journal(run, secrets.token_hex(8)))
    tenure.write_lease(attempt)
    return tenure


def _checked(run: RunDir, me: ThisJob, check: Callable[[], T], *, is_saved: bool = True) -> T:
    """Return the result of a check; raise NotRunnable where a person must submit the run again."""
    try:
        return check()
    except InputError as error:
        if not is_saved:
            raise Unsaved from error
        Journal(run).append(Refused(token=me.token, error=str(error)))
        raise NotRunnable(str(error), EXIT_RUN_FAILED) from error


# A job that Slurm is ending


def _not_carried_out(status: Status, me: ThisJob) -> Decision | None:
    """Return the decision of an earlier supervisor of this start of the job, if it had to put the run into the queue.

    It was journalled first, because `scontrol requeue` kills its own caller: a supervisor that was killed in between
    has not done it.
    """
    attempt = status.attempt
    if status.state != "queued" or attempt is None or attempt.ended is None or not me.began(attempt):
        return None
    if attempt.ended.next not in ("requeue", "successor"):
        return None
    if status.token != me.token and status.submitted is not None and status.submitted.by == "person":
        return None  # somebody has submitted the run again since
    return Decision(action=attempt.ended.next, reason=attempt.ended.reason)


def _leave(tenure: HeldLease) -> Decision:
    """Return how a job that Slurm is ending gets into the queue again. Raises NotRunnable where nothing is to be done.

    Only what Slurm says counts: a supervisor that starts in this moment has seen nothing.
    """
    me, journal = tenure.me, tenure.journal
    word = me.slurm_cause()
    if journal.status.open_attempt is None and word == "timeout":  # of setup lines: else it would have no budget
        journal.append(_next_attempt(tenure, [], 0))
    if journal.status.open_attempt is not None:
        decision = end_attempt(tenure, Facts(slurm_cause=word), RestartOptions(requeue=way_back(me.job)))
    elif word == "cancelled":
        journal.append(Cancelled(reason=f"job {me.job_id} was cancelled"))
        raise _over(journal.status)
    else:
        decision = Decision(action=way_back(me.job), reason=word or "Slurm ends the job")
        if not me.is_requeued() and decision.action == "requeue":
            journal.append(Requeued(job_id=me.job_id, reason=decision.reason))
    if me.is_requeued() or decision.action not in ("requeue", "successor"):
        raise _over(journal.status)
    return decision
