"""The end of an attempt: facts and traces become a cause, the cause a decision, both become events of the journal.

    Facts + ends/<attempt>/ --diagnose--> Verdict --decide--> Decision --> AttemptEnded, Finished | Cancelled | ...

attempt.py calls `end_attempt` with the begin lock and the lease held: in `close` for a supervisor, in `take_over` for
an attempt that nobody closed, in `rescue` for an agent without a supervisor.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace

from jobkit.disk import is_full, may_return, write_probe
from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.records import AttemptEnded, Cancelled, Cause, Finished, Lease, Request, Requeued
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, Status, fold
from jobkit.supervisor.diagnosis import Facts, LostNode, Traces, Verdict, diagnose, last_words
from jobkit.supervisor.lease import HeldLease, ThisJob
from jobkit.supervisor.retry import Decision, RestartOptions, decide

REQUESTS: dict[str, Cause] = {"cancel": "cancelled", "stop": "stopped", "preempt": "preempted"}
"""The wishes of commands; rather a cancel than a stop or a preemption."""


def request_of(run: RunDir, submission: int, attempt: int) -> Request | None:
    """Return what a person asks of an attempt, or of the submission that the person made.

    A cancel is about the submission: one that names the attempt before this one came between the two.
    """
    for request in filter(None, map(run.request, REQUESTS)):
        if request.submission == submission and (request.kind == "cancel" or request.attempt == attempt):
            return request
    return None


def cancel_of(status: Status, run: RunDir) -> Request | None:
    """Return the wish of a person that no attempt of the newest submission shall follow."""
    request = request_of(run, status.person_submission, 0)
    return request if request is not None and request.kind == "cancel" else None


class Unsaved(Exception):
    """Nothing is journalled yet: it would end this job's part in the run, whose newest snapshot is in memory alone.

    Whoever reads the journal counts on what is on the disk: `cancel` names it, and the next submission begins with it.
    """


def end_attempt(held_lease: HeldLease, facts: Facts, options: RestartOptions, *, is_saved: bool = True) -> Decision:
    """Journal the end of the open attempt and return the next step; without one, the decision after the last.

    With `is_saved=False` it raises Unsaved instead where no attempt follows in this job.
    """
    run, journal, status = held_lease.run, held_lease.journal, held_lease.journal.status
    attempt, is_command = status.open_attempt, bool(held_lease.config.command)
    if attempt is None:
        last = status.attempt.ended if status.attempt is not None else None
        return Decision(action=last.next, reason=last.reason) if last else Decision(action="stop", reason="")
    number, progress = attempt.number, run.progress()
    progress = progress if progress is not None and progress.attempt == number else None
    traces = Traces(
        ends=run.ends(number),
        peak_bytes=progress.peak_bytes if progress is not None else None,
        disk_is_full=lambda: is_full(write_probe(run.path)),
        said=lambda rank: last_words(run.rank_log(number, rank, "err")),
    )
    verdict = diagnose(facts, traces, attempt.began, command=is_command)
    request = request_of(run, attempt.submission, number)
    if request is not None and request.kind == "cancel" and verdict.cause != "finished":
        verdict = Verdict(cause="cancelled")
    steps = [end.step for end in traces.ends] + [exited.step for exited, _ in facts.exits if exited.step >= 0]
    steps += [progress.step] if progress is not None else []  # this report may be older than the death
    ended = AttemptEnded(
        attempt=number,
        time=time.time(),
        next="stop",
        first_step=progress.first_step if progress is not None else None,
        last_step=max((step for step in steps if step is not None), default=None),
        durable_step=run.durable_step(),
        snapshot_step=facts.snapshot_step,
        **(progress.repeats or {} if progress is not None else {}),
        loop_began=progress.loop_began if progress is not None else None,
        last_seen=progress.time if progress is not None else None,
        **asdict(verdict),
    )
    is_newest = attempt.submission == status.person_submission
    if is_newest:
        decision = decide(fold(status, ended).attempts, held_lease.config.retry, options, command=is_command)
    else:
        decision = Decision(action="successor", reason="the run was submitted again")
    if not is_saved and decision.action != "in_place":
        raise Unsaved
    is_tried = decision.action in ("in_place", "requeue", "successor")
    ended = replace(
        ended,
        next=decision.action,
        reason=decision.reason,
        tries=decision.tries,
        waited=decision.waited,
        next_at=ended.time + decision.pause if is_tried and decision.pause else None,
        gives_up_at=ended.time + decision.patience if is_tried and decision.patience is not None else None,
        gave_up=decision.gave_up,
        before_step=decision.before_step,
        avoid=dict(decision.avoid),
    )
    journal.note(ended)
    if verdict.cause == "finished":
        result = next((end.result for end in traces.ends if end.rank == 0), None)
        journal.note(Finished(result=result, step=ended.last_step))
    elif verdict.cause == "cancelled" and is_newest:
        journal.note(Cancelled(user=request.user if request is not None else ""))
    elif decision.action == "requeue":
        journal.note(Requeued(job_id=held_lease.this_job.job_id, reason=decision.reason))
    try:
        journal.flush()
    except OSError as error:
        if not may_return(error):
            raise
        log.warning("%s: %s: the end of attempt %d waits for the disk", run.name, error, number)
    return decision


def facts_of_rescue(this_job: ThisJob, dead_node: str | None) -> Facts:
    """Return the facts of an agent whose supervisor is gone, with or without the node of the batch script."""
    if dead_node is not None:
        return Facts(
            slurm_cause=this_job.slurm_cause(),
            lost_nodes=[LostNode(node=dead_node, why="it held the batch script, and is gone")],
        )
    return Facts(slurm_cause=this_job.slurm_cause(), stop_reason=("killed", "the batch script was killed"))


def facts_of_lost(run: RunDir, attempt: Attempt, this_job: ThisJob, lease: Lease | None) -> Facts:
    """Return what `take_over` knows of an attempt whose supervisor died with its job, or had no time.

    `lease` is the one of that supervisor.
    """
    if this_job.job is not None and (attempt.began.token, attempt.began.job_id) == (this_job.token, this_job.job_id):
        from jobkit.slurm import nodes

        # Slurm itself has put the job back: for the dead node of the batch script, or to make room.
        with contextlib.suppress(SchedulerError):
            if lease is not None and lease.node and nodes.died_since(lease.node, attempt.began.time):
                return Facts(lost_nodes=[LostNode(node=lease.node, why="it held the batch script, and died")])
        return Facts(slurm_cause="preempted")
    request = request_of(run, attempt.submission, attempt.number)
    return Facts() if request is None else Facts(stop_reason=(REQUESTS[request.kind], ""))
