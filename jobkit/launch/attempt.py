"""Beginning and end of an attempt, around the ranks: who owns the run directory, why it ended, what comes next.

The batch script runs `python -m jobkit.launch.attempt begin RUN` before srun and `... end RUN RC` after it; the local
controller calls the same two functions. No torch: this must work when the training processes cannot.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, JobkitError, SchedulerError
from jobkit.launch.requeue import Decision, decide
from jobkit.run import snapshot, status
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.scheduler import slurm


class NotRunnable(JobkitError):
    """The run is finished or cancelled, or its code is damaged: an attempt may not start."""


@dataclass(frozen=True)
class Begun:
    """An attempt that owns the run directory, and the environment its ranks get."""

    number: int
    environment: dict[str, str]


def begin(run: RunDir, job_id: str, scheduler: str) -> Begun:
    """Take the lease of the run directory for a new attempt; raises NotRunnable where there is nothing to run."""
    before = run.status()
    if before.state in (status.FINISHED, status.CANCELLED) or before.cancel_requested:
        raise NotRunnable(f"{run.name} is {before.state}; submit it again to continue it")
    if before.attempt and before.attempt.ended is None:
        # Its own end was never written: the batch script died with its node, or Slurm killed it without grace.
        run.record("interrupted", attempt=before.attempt.id, cause="killed")
    if problems := snapshot.verify(run.code, before.code):
        raise NotRunnable(f"the code snapshot is damaged: {problems[0]}; submit the run again to take a new one")
    number = before.attempt.id + 1 if before.attempt else 1
    run.logs(number).mkdir(parents=True, exist_ok=True)
    write_json(run.lease_file, {"attempt": number, "job_id": job_id, "host": socket.gethostname(), "pid": os.getpid()})
    run.record("started", attempt=number, job_id=job_id, host=socket.gethostname())
    return Begun(number, _environment(run, number, scheduler, before.code))


def _environment(run: RunDir, number: int, scheduler: str, code: str) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(run.config().resources.cpus_per_task)
    return {
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_ATTEMPT": str(number),
        "JOBKIT_SCHEDULER": scheduler,
        "JOBKIT_LOGS": str(run.logs(number)),
        "JOBKIT_CODE": str(run.code / code),
        "OMP_NUM_THREADS": threads,  # torch would take every core of the machine for each rank
    }


def end(run: RunDir, returncode: int, scheduler: str, job_id: str) -> Decision:
    """Record why the attempt ended, unless its ranks did, and decide what comes next; the caller carries it out."""
    now = run.status()
    attempt = now.attempt
    if attempt is None:
        return Decision(False, "never started")
    if attempt.ended is None:
        _record_hard_end(run, attempt.id, returncode, scheduler, job_id)
        now = run.status()
    cause = now.attempts[-1].cause or "crashed"
    if cause != "finished" and (now.cancel_requested or (scheduler == "slurm" and _was_cancelled(job_id))):
        cause = "cancelled"  # a scancel during the last save: the job must not come back
        if now.state != status.CANCELLED:
            run.record("cancelled", attempt=attempt.id)
    return decide(cause, now.attempts, now.checkpoint or 0)


def _record_hard_end(run: RunDir, attempt: int, returncode: int, scheduler: str, job_id: str) -> None:
    """The ranks ended without a word to the journal: they died, or were not given the time."""
    notice = read_json(run.notice_file(attempt))
    cause = notice.get("cause") if isinstance(notice, dict) else None
    if cause is None and scheduler == "slurm":
        job = _ask(job_id)
        cause = slurm.stop_cause(job, margin=0.0, now=time.time()) if job else None
    if cause is not None:
        run.record("interrupted", attempt=attempt, cause=cause)
        return
    killed = returncode in (-9, 137)
    how = "a rank was killed (SIGKILL: out of memory?)" if killed else f"the ranks ended with exit code {returncode}"
    error = first_error(run, attempt) or {"error": f"{how}, without a traceback"}
    run.record("failed", attempt=attempt, cause="crashed", **error)


def first_error(run: RunDir, attempt: int) -> dict[str, object] | None:
    """The earliest exception that a rank of this attempt wrote down: {error, rank, step}, or None."""
    written = [read_json(file) for file in run.logs(attempt).glob("error_*.json")]
    earliest = min((one for one in written if one), key=lambda one: float(one["time"]), default=None)
    return {key: earliest[key] for key in ("error", "rank", "step")} if earliest else None


def _ask(job_id: str) -> slurm.JobInfo | None:
    try:
        return slurm.show_job(job_id)
    except SchedulerError as error:
        print(f"jobkit: {error}", file=sys.stderr)
        return None


def _was_cancelled(job_id: str) -> bool:
    job = _ask(job_id)
    return job is not None and slurm.stop_cause(job, margin=0.0, now=time.time()) == "cancelled"


def _end_on_slurm(run: RunDir, returncode: int, job_id: str) -> int:
    decision = end(run, returncode, "slurm", job_id)
    if not decision.requeue:
        if decision.failed:
            run.record("failed", cause="timeout", error=decision.reason)
        state = run.status().state
        print(f"jobkit: {run.name}: {decision.reason}, not requeued", file=sys.stderr)
        return EXIT_FINISHED if state in (status.FINISHED, status.CANCELLED) else EXIT_FAILED
    # Journalled first: from the moment Slurm agrees, this script may be killed at any line.
    run.record("requeued", job_id=job_id, cause=decision.reason)
    problem = None
    for pause in (0, 2, 10, 30, 60, 60):  # a controller that restarts is away for a minute or two
        time.sleep(pause)
        job = _ask(job_id)
        if job is not None and job.requeued_by_slurm:
            return EXIT_FINISHED
        try:
            slurm.requeue(job_id)
        except SchedulerError as error:
            problem = str(error)
            print(f"jobkit: {run.name}: {problem}", file=sys.stderr)
        else:
            return EXIT_FINISHED
    run.record("requeue_failed", job_id=job_id, error=problem)
    print(f"jobkit: {run.name}: not requeued; the same command continues it", file=sys.stderr)
    return EXIT_RESUMABLE


def main(arguments: list[str]) -> int:
    """`begin RUN` prints the exports for the batch script; `end RUN RC` requeues where that is right."""
    verb, path, *rest = arguments
    run = RunDir(Path(path))
    job_id = slurm.current_job() or ""
    if verb == "begin":
        try:
            begun = begin(run, job_id, "slurm")
        except NotRunnable as error:
            print(f"jobkit: {error}", file=sys.stderr)
            return EXIT_FAILED
        for name, value in begun.environment.items():
            print(f"export {name}={shlex.quote(value)}")
        return EXIT_FINISHED
    return _end_on_slurm(run, int(rest[0]), job_id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
