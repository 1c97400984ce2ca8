"""Beginning and end of an attempt, around the ranks: who owns the run directory, why it ended, what comes next.

The batch script's program (supervisor/batch.py) and the local controller (submission/local.py) call the same two
functions. No torch: this must work when the training processes cannot.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.run import snapshot, status
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt
from jobkit.supervisor.diagnosis import EndCause, FirstFailure, diagnose, first_failure, srun_said
from jobkit.supervisor.retry import Decision, decide


class NotRunnable(JobkitError):
    """The run is finished or cancelled, or its code is damaged: an attempt may not start."""


@dataclass(frozen=True)
class Begun:
    """An attempt that owns the run directory, and the environment its ranks get."""

    number: int
    environment: dict[str, str]


def begin(run: RunDir, job_id: str, scheduler: str) -> Begun:
    """Take the lease of the run directory for a new attempt; raises NotRunnable where there is nothing to run."""
    config = run.config()  # an attempt whose ranks could not read it does not begin
    before = run.status()
    if before.state in (status.FINISHED, status.CANCELLED) or before.cancel_requested:
        raise NotRunnable(f"{run.name} is {before.state}; submit it again to continue it")
    if before.attempt and before.attempt.ended is None:
        _refuse_second_job(before, job_id, scheduler)
        close_lost_attempt(run, before.attempt, job_id, scheduler)
    if problems := snapshot.verify(run.code, before.code):
        raise NotRunnable(f"the code snapshot is damaged: {problems[0]}; submit the run again to take a new one")
    number = before.attempt.id + 1 if before.attempt else 1
    run.logs(number).mkdir(parents=True, exist_ok=True)
    lease = {"attempt": number, "job_id": job_id, "host": socket.gethostname(), "pid": os.getpid()}
    write_json(run.lease_file, lease | {"node": os.environ.get("SLURMD_NODENAME")})
    run.failed_starts.unlink(missing_ok=True)
    run.record("started", attempt=number, job_id=job_id, host=socket.gethostname())
    return Begun(number, _environment(run, number, scheduler, before.code, config.resources.cpus_per_task))


def _refuse_second_job(before: status.Status, job_id: str, scheduler: str) -> None:
    """Two jobs of one run may be in the queue after a controller that gave no answer: the first one runs it."""
    assert before.attempt is not None
    other = before.attempt.job_id
    if scheduler == before.scheduler == "slurm" and other != job_id:
        job = ask(other)
        if job is not None and job.state == "RUNNING":
            raise NotRunnable(f"job {other} runs it already")


def close_lost_attempt(run: RunDir, attempt: Attempt, job_id: str, scheduler: str) -> None:
    """Write the end of an attempt whose batch script died with its node, or was given no time, for the journal."""
    lease = read_json(run.lease_file)
    node = lease.get("node") if isinstance(lease, dict) else None
    notice = read_json(run.notice_file(attempt.id))
    death = EndCause("lost")
    first = first_failure(srun_said(run, attempt.id))
    if first is not None and first.node_lost:
        death = diagnose(run, attempt.id, 1, first, None)
    elif isinstance(notice, dict) and notice.get("cause"):
        death = EndCause(str(notice["cause"]))
    elif scheduler == "slurm" and attempt.job_id == job_id:
        # Slurm itself has put the job back: for the dead node of the batch script, or to make room.
        dead = node and _has_died(node, attempt.started)
        death = (
            EndCause("node_failure", {"node": node, "error": f"node {node} died"}) if dead else EndCause("preempted")
        )
    _record_end(run, attempt.id, death)
    run.record("requeued", job_id=job_id, cause=death.cause, by="slurm")


def _environment(run: RunDir, number: int, scheduler: str, code: str, cpus: int) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(cpus)
    return {
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_ATTEMPT": str(number),
        "JOBKIT_SCHEDULER": scheduler,
        "JOBKIT_LOGS": str(run.logs(number)),
        "JOBKIT_CODE": str(run.code / code),
        "OMP_NUM_THREADS": threads,  # torch would take every core of the machine for each rank
    }


def end(
    run: RunDir,
    number: int,
    job_id: str,
    *,
    first: FirstFailure | None = None,
    job: slurm.JobInfo | None = None,
    all_returned: bool = False,
) -> Decision:
    """Record why attempt `number` ended, unless its ranks did, and decide what comes next; the caller carries it out.

    `first` is the first rank to die, where one did; `job` is Slurm's record of the job, None for a local one;
    `all_returned` is whether every rank ended with exit code 0.
    """
    now = run.status()
    attempt = next((one for one in now.attempts if one.id == number), None)
    if attempt is None or run.owner() not in (number, None):
        return Decision("stop", "another attempt owns the run")
    if attempt.ended is None:
        if all_returned and run.config().command and not _was_told_to_stop(run, number, job):
            run.record("finished", attempt=number)  # a script that asked for no context has said all it had to say
        else:
            death = diagnose(run, number, run.config().resources.nodes, first, job)
            _record_end(run, number, _obeyed(death, first, job) if run.config().command else death)
    elif attempt.cause not in ("finished", "cancelled") and job and slurm.stop_cause(job) == "cancelled":
        run.record("cancelled", attempt=number)  # a scancel during the last save: the job must not come back
    now = run.status()
    if now.state in (status.FINISHED, status.CANCELLED):
        return Decision("stop", now.state)
    if now.state == status.QUEUED and now.job_id != job_id:
        return Decision("stop", f"job {now.job_id} continues it")
    if now.cancel_requested:
        run.record("cancelled", attempt=number)
        return Decision("stop", "cancelled")
    decision = decide(
        now.attempts,
        run.config().retry,
        excluded=now.excluded_nodes,
        can_requeue=job is None or job.requeueable,
    )
    if decision.failed:
        run.record("failed", attempt=number, cause=now.attempts[-1].cause, error=decision.reason)
    for node in decision.exclude:
        run.record("excluded", node=node)
    return decision


def _was_told_to_stop(run: RunDir, attempt: int, job: slurm.JobInfo | None) -> bool:
    """Whether exit code 0 may mean: stopped as asked, and not: done."""
    return read_json(run.notice_file(attempt)) is not None or (job is not None and slurm.stop_cause(job) is not None)


def _obeyed(death: EndCause, first: FirstFailure | None, job: slurm.JobInfo | None) -> EndCause:
    """What the signal meant that a command died of: without jobkit.init, that is how it stops."""
    if death.cause != "killed" or first is None or first.signal not in (signal.SIGTERM, signal.SIGUSR2):
        return death
    near_limit = job is not None and slurm.early_timeout_signal(job, slurm.stop_margin(job.limit or 0.0))
    return EndCause("timeout" if first.signal == signal.SIGUSR2 and near_limit else "signal")


def _record_end(run: RunDir, attempt: int, death: EndCause) -> None:
    """The ranks ended without a word to the journal: say what is known, and how far they had come."""
    progress = read_json(run.progress_file)
    seen = progress if isinstance(progress, dict) and progress.get("attempt") == attempt else {}
    # The report may be older than the failure.
    steps = [step for step in (seen.get("step"), death.failure.get("step")) if step is not None]
    reached = {"reached": max(steps, default=None), "last_seen": seen.get("time", 0.0) - seen.get("idle", 0.0) or None}
    run.record("interrupted", attempt=attempt, cause=death.cause, failure=death.failure, **reached)


def _has_died(node: str, since: float) -> bool:
    try:
        return slurm.died_since(node, since)
    except SchedulerError:
        return False


def ask(job_id: str) -> slurm.JobInfo | None:
    """Slurm's record of a job; None, after a word about it, where Slurm does not answer."""
    try:
        return slurm.show_job(job_id)
    except SchedulerError as error:
        print(f"jobkit: {error}", file=sys.stderr)
        return None
