"""The end of an attempt: facts and traces become a cause, the cause a decision, both become events of the journal.

    Facts + ends/<attempt>/ --diagnose--> Verdict --decide--> Decision --> Ended, Excluded, Finished | Cancelled | ...

supervisor/attempt.py calls `end_attempt` with the begin lock and the lease held: for a supervisor, for the next begin
of an attempt that nobody closed, and for an agent that rescues.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace

from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.disk import is_full, write_probe
from jobkit.run.records import Cancelled, Ended, Excluded, Finished, Lease, Progress, Requeued
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, Status, fold
from jobkit.supervisor.diagnosis import Facts, LostNode, Traces, Verdict, diagnose, last_words
from jobkit.supervisor.retry import Decision, Room, decide
from jobkit.supervisor.tenure import Me, Tenure, request_of


def end_attempt(tenure: Tenure, facts: Facts, room: Room) -> Decision:
    """Journal the end of the open attempt and return what is next; without one, what was decided after the last."""
    run, me, journal, status = tenure.run, tenure.me, tenure.journal, tenure.journal.status
    attempt = status.open_attempt
    if attempt is None:
        last = status.attempt.ended if status.attempt is not None else None
        return Decision(action=last.next, reason=last.reason) if last else Decision(action="stop", reason="")
    is_command = bool(tenure.config.command)
    progress = run.progress()
    progress = progress if progress is not None and progress.attempt == attempt.number else None
    traces = _traces(run, attempt.number, progress)
    verdict = diagnose(facts, traces, attempt.began, command=is_command)
    request = request_of(run, me.token, attempt.number)
    if request is not None and request.kind == "cancel" and verdict.cause != "finished":
        verdict = Verdict(cause="cancelled")
    ended = replace(
        _ended(status, attempt, verdict, progress),
        last_step=_last_step(facts, traces, progress),
        durable_step=run.durable_step(),
    )
    if attempt.submission != status.person_submission:
        decision = Decision(action="successor", reason="the run was submitted again")
    else:
        attempts = fold(status, ended).attempts_of_submission()
        excluded = status.excluded_nodes
        decision = decide(attempts, tenure.config.retry, room, command=is_command, excluded=excluded)
    journal.note(replace(ended, next=decision.action, reason=decision.reason))
    for node, why in decision.exclude.items():
        journal.note(Excluded(node=node, reason=why))
    if verdict.cause == "finished":
        result = next((end.result for end in traces.ends if end.rank == 0), None)
        journal.note(Finished(result=result, step=ended.last_step))
    elif verdict.cause == "cancelled" and attempt.submission == status.person_submission:
        journal.note(Cancelled(user=request.user if request is not None else ""))
    elif decision.action == "requeue":
        journal.note(Requeued(job_id=me.job_id, reason=decision.reason))
    try:
        journal.flush()
    except OSError as error:
        if not is_full(error):
            raise
        log.warning("%s: %s: the end of attempt %d waits for room on the disk", run.name, error, attempt.number)
    return decision


def _traces(run: RunDir, number: int, progress: Progress | None) -> Traces:
    return Traces(
        ends=run.ends(number),
        peak_bytes=progress.peak_bytes if progress is not None else None,
        disk_is_full=lambda: is_full(write_probe(run.path)),
        said=lambda rank: last_words(run.rank_log(number, rank, "err")),
    )


def _ended(status: Status, attempt: Attempt, verdict: Verdict, progress: Progress | None) -> Ended:
    """Return the event of an attempt's end; what is next is still open."""
    return Ended(
        attempt=attempt.number,
        time=time.time(),
        next="stop",
        first_step=progress.first_step if progress is not None else None,
        loop_began=progress.loop_began if progress is not None else None,
        last_seen=progress.time if progress is not None else None,
        **asdict(verdict),
    )


def _last_step(facts: Facts, traces: Traces, progress: Progress | None) -> int | None:
    """Return the steps done; a progress report may be older than the death."""
    steps = [end.step for end in traces.ends]
    steps += [exited.step for exited, _ in facts.exits if exited.step >= 0]
    steps += [progress.step] if progress is not None else []
    return max((step for step in steps if step is not None), default=None)


# Attempts that their supervisor did not close


def facts_of_rescue(me: Me, dead_node: str | None) -> Facts:
    """Return what an agent knows whose supervisor is gone, with the node of the batch script or without it."""
    if dead_node is not None:
        return Facts(word=me.word(), lost_nodes=[LostNode(node=dead_node, why="it held the batch script, and is gone")])
    return Facts(word=me.word(), asked=("killed", "the batch script was killed"))


def facts_of_lost(run: RunDir, attempt: Attempt, me: Me, lease: Lease | None) -> Facts:
    """Return what the next begin knows of an attempt whose supervisor died with its job, or had no time.

    `lease` is the one of that supervisor.
    """
    if me.job is not None and (attempt.began.token, attempt.began.job_id) == (me.token, me.job_id):
        from jobkit.slurm import nodes

        # Slurm itself has put the job back: for the dead node of the batch script, or to make room.
        with contextlib.suppress(SchedulerError):
            if lease is not None and lease.node and nodes.died_since(lease.node, attempt.began.time):
                return Facts(lost_nodes=[LostNode(node=lease.node, why="it held the batch script, and died")])
        return Facts(word="preempted")
    request = request_of(run, attempt.began.token, attempt.number)
    if request is None:
        return Facts()
    causes = {"cancel": "cancelled", "stop": "stopped", "preempt": "preempted"}
    return Facts(asked=(causes[request.kind], ""))  # type: ignore[arg-type]
