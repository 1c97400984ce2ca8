"""The life of an attempt in the journal: who may begin it, why it ended, what is next.

    take_over() --Tenure--> begin() --Began--> (the ranks live) --> close() --Ended, Finished ...--> Decision
                              ^------------------ in place ------------------------------------------'

The supervisor calls these; an agent whose supervisor is gone calls `rescue`, which closes too. Each holds the run's
begin lock, and the journal takes events from the holder of the lease alone: a process that has lost it gets LostLease.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from jobkit.run.journal import Journal
from jobkit.run.records import Began, Cancelled, Requeued
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.supervisor import retry
from jobkit.supervisor.closing import end_attempt, facts_of_lost, facts_of_rescue
from jobkit.supervisor.diagnosis import Facts, LostNode
from jobkit.supervisor.retry import Decision, Room
from jobkit.supervisor.tenure import (
    EXIT_RUN_FAILED,
    Me,
    NotRunnable,
    Tenure,
    belongs_to,
    check_lease,
    config_of,
    over,
    refuse,
    request_of,
    take_lease,
    write_lease,
)

__all__ = [
    "EXIT_RUN_FAILED",
    "Decision",
    "Facts",
    "LostNode",
    "Me",
    "NotRunnable",
    "Room",
    "Tenure",
    "begin",
    "close",
    "pause",
    "request_of",
    "rescue",
    "take_over",
]


def take_over(run: RunDir, me: Me) -> Tenure:
    """Return the right to write for this job. Raises NotRunnable where the job has nothing to run (any more).

    An open attempt of an earlier job, or of an earlier start of this one, is closed.
    """
    with run.begin_lock():  # a second job of the run may start in the same second
        status, before = Journal(run).status, run.lease()
        decision = _not_carried_out(status, me)
        refuse(status, me, decision)
        if (
            before is not None
            and (before.token, before.job_id) == (me.token, me.job_id)
            and before.restart > me.restart
        ):
            raise NotRunnable(f"{run.name}: job {me.job_id} was started again, and this start of it is over")
        config = config_of(run, me)
        attempt = status.open_attempt
        is_ours = attempt is not None and belongs_to(attempt, me)
        tenure = take_lease(run, me, config, attempt.number if attempt is not None and is_ours else 0)
        if decision is not None:
            return replace(tenure, decision=decision)
        if me.job is not None and (me.job.restarts > me.restart or not me.job.runs):
            return replace(tenure, decision=_leave(tenure))
        if attempt is None:
            return tenure
        if is_ours:
            return replace(tenure, adopted=attempt)
        decision = end_attempt(tenure, facts_of_lost(run, attempt, me, before), Room(requeue="requeue"))
        if decision.action in ("stop", "fail"):
            raise over(tenure.journal.status)
        return tenure


def begin(tenure: Tenure, nodes: list[str], ranks: int) -> int:
    """Journal a new attempt and return its number.

    Raises NotRunnable (cancelled, or submitted again meanwhile), LostLease, and OSError where the disk is full: an
    attempt that is not in the journal does not begin.
    """
    run, me, journal = tenure.run, tenure.me, tenure.journal
    with run.begin_lock():
        check_lease(tenure)
        journal.flush()  # the end of the last attempt may still wait for room on the disk
        journal.refresh()
        refuse(journal.status, me, None)
        assert journal.status.open_attempt is None, "the last attempt is not closed"
        last = journal.status.attempt
        number = last.number + 1 if last is not None else 1
        request = request_of(run, me.token, number)
        if request is not None and request.kind == "cancel":
            journal.append(Cancelled(user=request.user))
            raise over(journal.status)
        run.logs(number).mkdir(parents=True, exist_ok=True)
        run.ends_folder(number).mkdir(parents=True, exist_ok=True)
        # Before the journal: from here on ranks of an older attempt that still live publish nothing.
        write_lease(run, me, tenure.writer, number)
        for kind in ("cancel", "preempt", "stop"):
            stale = run.request(kind)
            if stale is not None and not (kind == "cancel" and stale.token == me.token):  # such a cancel came just now
                run.request_file(kind).unlink(missing_ok=True)
        journal.append(
            Began(
                attempt=number,
                token=me.token,
                job_id=me.job_id,
                restart=me.restart,
                how="start" if last is None else "in place" if belongs_to(last, me) else "requeue",
                nodes=nodes,
                ranks=ranks,
                host=socket.gethostname(),
            )
        )
        run.failed_starts.unlink(missing_ok=True)  # last: until then the job script counts this start as failed
        return number


def pause(tenure: Tenure) -> float:
    """Return the seconds until the next attempt may begin: a fault that comes again and again may pass with time."""
    status = tenure.journal.status
    last = status.attempt
    if last is None or last.ended is None or not belongs_to(last, tenure.me):
        return 0.0
    seconds = retry.pause(status.attempts_of_submission(), command=bool(tenure.config.command))
    return min(seconds, last.ended.time + seconds - time.time())


def close(tenure: Tenure, facts: Facts, room: Room) -> Decision:
    """Journal why the open attempt ended, and return what is next. Harmless to call twice. Raises LostLease.

    A full disk does not raise: the events wait in `tenure.journal`, whose `flush` is to be tried again.
    """
    with tenure.run.begin_lock():
        check_lease(tenure)
        tenure.journal.refresh()
        return end_attempt(tenure, facts, room)


def rescue(run: RunDir, me: Me, writer: str, dead_node: str | None = None) -> Tenure | None:
    """Close the attempt of a job whose batch script is gone; None if another process acts, or nothing is to be done.

    An agent calls it, and carries out the `decision` of the Tenure (requeue, successor). `writer` is the supervisor
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
            refuse(status, me, decision)
        except NotRunnable:
            return None
        tenure = take_lease(run, me, run.config(), lease.attempt)  # its ranks may still save
        if decision is None and status.open_attempt is not None:
            decision = end_attempt(tenure, facts_of_rescue(me, dead_node), me.room())
        try:
            decision = decision or _leave(tenure)  # the supervisor died between two attempts, or before the first
        except NotRunnable:
            return None
        return replace(tenure, decision=decision) if decision.action in ("requeue", "successor") else None


# A job that Slurm is ending


def _not_carried_out(status: Status, me: Me) -> Decision | None:
    """Return the decision of an earlier supervisor of this start of the job, if it had to put the run into the queue.

    It was journalled first, because `scontrol requeue` kills its own caller: a supervisor that was killed in between
    has not done it.
    """
    attempt = status.attempt
    if status.state != "queued" or attempt is None or attempt.ended is None or not belongs_to(attempt, me):
        return None
    if attempt.ended.next not in ("requeue", "successor"):
        return None
    if status.token != me.token and status.submitted is not None and status.submitted.by == "person":
        return None  # somebody has submitted the run again since
    return Decision(action=attempt.ended.next, reason=attempt.ended.reason)


def _leave(tenure: Tenure) -> Decision:
    """Return how a job that Slurm is ending gets into the queue again. Raises NotRunnable where nothing is to be done.

    Only what Slurm says counts: a supervisor that starts in this moment has seen nothing.
    """
    me, journal = tenure.me, tenure.journal
    word = me.word()
    if journal.status.open_attempt is not None:
        decision = end_attempt(tenure, Facts(word=word), me.room())
    elif word == "cancelled":
        journal.append(Cancelled(reason=f"job {me.job_id} was cancelled"))
        raise over(journal.status)
    else:
        action = me.room().requeue
        assert action != "none"
        decision = Decision(action=action, reason=word or "Slurm ends the job")
        if not me.is_requeued() and action == "requeue":
            journal.append(Requeued(job_id=me.job_id, reason=decision.reason))
    if me.is_requeued() or decision.action not in ("requeue", "successor"):
        raise over(journal.status)
    return decision
