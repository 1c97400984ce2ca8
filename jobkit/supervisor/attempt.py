"""The life cycle of an attempt, around its ranks: who owns the run directory, why it ended, what comes next.

The supervisor and scripts with jobkit.init call the same functions. No torch: this must work when the training
processes cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit import slurm
from jobkit.errors import JobkitError, SchedulerError
from jobkit.log import log
from jobkit.run import processes, records, secrets, snapshot, status
from jobkit.run.events import Event
from jobkit.run.files import foreign_owner, is_there, write_atomic
from jobkit.run.records import Lease, StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.silent import NOTHING_KEPT
from jobkit.run.status import Attempt, State
from jobkit.supervisor import diagnosis
from jobkit.supervisor.diagnosis import EndCause, FirstFailure, Notice
from jobkit.supervisor.retry import CanReplace, Decision, decide

_STOPS = ("preempted", "timeout", "signal", "cancelled", "user")
"""Causes for which the ranks were told to stop."""


class NotRunnable(JobkitError):
    """The run is finished or cancelled, another job runs it, or its code is damaged: no attempt may start."""


@dataclass(frozen=True)
class Begun:
    """An attempt that owns the run directory, and the environment its ranks get."""

    number: int
    code: str
    """The version of the user's code that it runs: the name of its snapshot, empty where there is none."""
    environment: dict[str, str]


def begin(run: RunDir, *, job_id: str, scheduler: str, launcher: str | None = None) -> Begun:
    """Take the lease of the run directory for a new attempt; an attempt that never ended is closed first.

    The run has been submitted: its config is written, and the journal has `submitting`. `launcher` is who started the
    ranks, where jobkit did not. Raises NotRunnable where there is nothing to run.
    """
    with run.begin_lock():  # a second job, of an sbatch that gave no answer, may start in the same second
        config = run.config()  # an attempt whose ranks could not read it does not begin
        if lacking := secrets.lacking_in(dataclasses.asdict(config)):
            raise NotRunnable(f"{run.name}: the value of {', '.join(lacking)} is lost; submit the run again with it")
        before = run.status()
        if before.state in (State.FINISHED, State.CANCELLED) or before.cancel_requested:
            if before.state not in (State.FINISHED, State.CANCELLED):
                run.record(Event.CANCELLED)  # it was cancelled between two attempts
            raise NotRunnable(f"{run.name} is {before.state}; submit it again to continue it")
        _refuse_second_job(run, before, job_id, scheduler)
        if before.attempt and before.attempt.ended is None:
            close_lost_attempt(run, before.attempt, job_id, scheduler)
        _check_code(run, before, job_id)
        pickled = run.submitted_pickle
        if is_there(pickled) and (owner := foreign_owner(pickled, run.path)):
            raise NotRunnable(f"{pickled} is not the run's owner's, but {owner}'s; submit the run again")
        number = before.attempt.id + 1 if before.attempt else 1
        run.logs(number).mkdir(parents=True, exist_ok=True)
        node = os.environ.get("SLURMD_NODENAME") if scheduler == "slurm" else None
        host = socket.gethostname()
        # Before the journal: from here on an older attempt that still lives publishes and journals nothing.
        process = processes.named(os.getpid())
        records.write(run.lease_file, Lease(attempt=number, job_id=job_id, host=host, process=process, node=node))
        # Submitit, in the ranks, looks for its pickle by the id of the job, which was not known when it was written.
        if pickled.exists():
            write_atomic(run.submitit / f"{job_id}_submitted.pkl", pickled.read_bytes())
        who = {"launcher": launcher} if launcher else {}
        run.record(Event.STARTED, attempt=number, job_id=job_id, host=host, **who)
        # A cancel since the look above has found no attempt to tell; one from here on finds this one.
        if (now := run.status()).cancel_requested:
            request_stop(run, number, StopRequest(cause="cancelled", grace=now.cancel_seconds_left))
        run.failed_starts.unlink(missing_ok=True)  # last: until then the batch script would try another node
    return Begun(number, before.code, _environment(run, number, scheduler, before, config.resources.cpus_per_task))


def _check_code(run: RunDir, before: status.Status, job_id: str) -> None:
    """Refuse programs that are not as they were submitted, and tell of other files: the run itself may write those.

    Before the attempt counts: a damaged snapshot is not a crash that another attempt could mend.
    """
    found = snapshot.verify(run.code, before.code) if before.code else []
    if damaged := [one for one in found if one.is_program]:
        error = f"the code snapshot is damaged: {damaged[0]}; submit the run again to take a new one"
        run.record(Event.REQUEUE_FAILED, job_id=job_id, error=error)
        raise NotRunnable(error)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        log.warning("%s%s: what a run writes belongs into ${run_dir}/outputs", found[0], more)


def _is_of_this_slurm(now: status.Status, attempt: Attempt) -> bool:
    """Whether an attempt's job was one of the Slurm that has the newest: another one's ids say nothing here."""
    return now.scheduler == "slurm" and attempt.slurm_cluster == now.slurm_cluster


def _refuse_second_job(run: RunDir, before: status.Status, job_id: str, scheduler: str) -> None:
    """Two jobs of one run may be in the queue, after a controller that gave no answer or on two clusters: the one that
    was submitted last runs it, and where that has ended no other one does."""
    other, there = before.job_id, before.slurm_cluster
    if scheduler != "slurm" or before.scheduler is None:
        return
    if before.scheduler != "slurm":
        raise NotRunnable(f"it was submitted elsewhere since: {before.cluster}")
    with contextlib.suppress(SchedulerError):
        here = slurm.cluster()
        # One with this job's id is another cluster's by its name alone: slurmctld may have moved to another host.
        is_other = there not in (None, here) and (other != job_id or slurm.name_of(str(there)) != slurm.name_of(here))
        if is_other:
            raise NotRunnable(f"it was submitted to {there} since{f', as job {other}' if other else ''}")
        if there not in (None, here) and before.state == State.FAILED:  # ids of two clusters of one name may be equal
            raise NotRunnable(f"it has failed, in job {other} of {there}; submit it again to continue it")
    if other in (None, job_id):  # it may start before its submission has written down which job it is
        return
    if before.state == State.FAILED:
        raise NotRunnable(f"it has failed, in job {other}; submit it again to continue it")
    job = ask(str(other))
    if job is not None and job.state in ("PENDING", "RUNNING") and job.runs(run.batch_script):
        raise NotRunnable(f"job {other} is to run it, or does")


def close_lost_attempt(run: RunDir, attempt: Attempt, job_id: str, scheduler: str) -> None:
    """Record the end of an attempt that nobody could record: its supervisor died with its node, or had no time."""
    cause = _cause_of_lost(run, attempt, job_id, scheduler)
    _record_end(run, attempt.id, cause)
    if scheduler == "slurm":
        run.record(Event.REQUEUED, job_id=job_id, cause=cause.cause, by="slurm")


def _cause_of_lost(run: RunDir, attempt: Attempt, job_id: str, scheduler: str) -> EndCause:
    # srun first: it saw the node die, after which Slurm says only that it has requeued the job.
    first = diagnosis.first_failure(diagnosis.srun_said_about(run, run.status().attempts, attempt.id))
    if first is not None and first.node_lost:
        return diagnosis.diagnose(run, attempt.id, 1, first, None)
    request = run.stop_request(attempt.id)
    if request is not None:
        return EndCause(request.cause)
    if scheduler == "slurm" and attempt.job_id == job_id and _is_of_this_slurm(run.status(), attempt):
        # Slurm itself has put the job back: for the dead node of the batch script, or to make room.
        lease = run.lease()
        with contextlib.suppress(SchedulerError):
            if lease is not None and lease.node and slurm.died_since(lease.node, attempt.started):
                return diagnosis.node_died(lease.node)
        return EndCause("preempted")
    return diagnosis.own_failure(run, attempt.id) or EndCause("lost")


def _environment(run: RunDir, number: int, scheduler: str, submitted: status.Status, cpus: int) -> dict[str, str]:
    return {
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_ATTEMPT": str(number),
        "JOBKIT_SCHEDULER": scheduler,
        "JOBKIT_LOGS": str(run.logs(number)),
        "JOBKIT_CODE": str(run.code / submitted.code),
        # What that is a copy of: the job's own folder may be another, after a `cd` in `setup`.
        "JOBKIT_SOURCE": submitted.cwd or str(Path.cwd()),
        # Without it torch would take every core of the machine for each rank.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(cpus),
    }


def end(
    run: RunDir,
    number: int,
    job_id: str,
    *,
    first: FirstFailure | None = None,
    job: slurm.JobInfo | None = None,
    all_returned: bool = False,
    told: Notice | None = None,
    keeps_nodes: Callable[[Sequence[str]], bool] = lambda without: False,
    can_replace: CanReplace = lambda nodes: True,
    noticed: float | None = None,
    last_step: tuple[int, float] | None = None,
) -> Decision:
    """Record why attempt `number` ended, unless its ranks did, and decide what comes next; the caller carries it out.

    `first` is the first rank to fail, where one did; `job` is Slurm's record of the job, None for a local one;
    `all_returned` is whether every rank ended with exit code 0; `told` is how Slurm told them to stop, where it did;
    `keeps_nodes` and `can_replace` are decide's; `noticed` is when the supervisor learned of the end, in seconds since
    the epoch; `last_step` is how many steps the ranks had done, and when. Harmless to call twice.
    """
    now = run.status()
    attempt = next((one for one in now.attempts if one.id == number), None)
    if attempt is None or run.owner() not in (number, None):
        return Decision("stop", "another attempt owns the run")
    if attempt.ended is None:
        config = run.config()
        is_silent = bool(config.command) and attempt.resumed is None
        notice = _last_notice(run, told, job) if config.command else None
        signalled = notice if is_silent else None  # the others say themselves what it meant
        stopped = run.stop_request(number) is not None or (job is not None and slurm.stop_cause(job) is not None)
        if all_returned and config.command and signalled is None and not stopped:
            # A command without jobkit.init reports by its exit code alone: 0 is done, unless it was told to stop.
            run.record(Event.FINISHED, attempt=number)
        else:
            cause = diagnosis.diagnose(run, number, config.resources.nodes, first, job, is_silent=is_silent)
            died_of_it = first is not None and first.signal is not None and first.signal == notice
            has_exited = first is None or first.code is not None  # a shell whose program died of it exits with any code
            if notice is not None and (died_of_it or (is_silent and has_exited)):
                cause = _cause_of_notice(run, cause, notice, job)
            _record_end(run, number, cause, noticed, last_step)
            if is_silent and cause.cause in _STOPS:
                log.info("%s: %s: your program was told to stop; %s", run.name, cause.cause, NOTHING_KEPT)
    elif attempt.cause not in ("finished", "cancelled") and job and slurm.stop_cause(job) == "cancelled":
        run.record(Event.CANCELLED, attempt=number)  # a scancel during the last save: the job must not come back
    now = run.status()
    if now.state in (State.FINISHED, State.CANCELLED):
        return Decision("stop", now.state)
    if now.state == State.QUEUED and now.job_id != job_id:  # `end` was called again, after a resubmission
        return Decision("stop", f"job {now.job_id} continues it")
    if now.cancel_requested:  # `jobkit cancel` came when the ranks had ended already
        run.record(Event.CANCELLED, attempt=number)
        return Decision("stop", "cancelled")
    decision = decide(
        now.attempts,
        run.config().retry,
        is_command=bool(run.config().command),
        excluded=now.excluded_nodes,
        can_requeue=job is None or job.requeueable,
        keeps_nodes=keeps_nodes,
        can_replace=can_replace,
    )
    if decision.failed:
        run.record(Event.FAILED, attempt=number, cause=now.attempts[-1].cause, error=decision.reason)
    for node in decision.exclude:
        run.record(Event.EXCLUDED, node=node)
    return decision


def request_stop(run: RunDir, attempt: int, request: StopRequest, *, replace: bool = False) -> None:
    """Write down why this attempt is being ended, unless somebody has; a full disk must not keep it from ending."""
    if replace or run.stop_request(attempt) is None:
        with contextlib.suppress(OSError):
            records.write(run.stop_request_file(attempt), request)


def notice_margin(run: RunDir, limit: float | None) -> float:
    """How many seconds before its time limit of `limit` a command that reports nothing is told of it: a stop's margin,
    or more where its cluster's entry gives it more."""
    entry = run.config().clusters.get(str(run.status().cluster), {})
    delay = next((value for key, value in entry.items() if key.replace("-", "_") == "signal_delay_s"), 0)
    return max(delay, slurm.stop_margin(math.inf if limit is None else limit))


def _last_notice(run: RunDir, told: Notice | None, job: slurm.JobInfo | None) -> int | None:
    """The signal of a notice that its command may have ended for; one that it has survived for longer was none."""
    margin = notice_margin(run, job.limit if job is not None else None)
    longest = margin + slurm.EARLY_SIGNAL_SECONDS + 5  # the signal's own way
    return told.signal if told is not None and told.seconds <= longest else None


def _cause_of_notice(run: RunDir, cause: EndCause, number: int, job: slurm.JobInfo | None) -> EndCause:
    """What the signal meant that a command ended of, or for: without jobkit.init, that is how it stops."""
    says_why = cause.cause not in ("killed", "crashed") or cause.failure.traceback is not None
    if says_why or number not in (signal.SIGTERM, signal.SIGUSR2):
        return cause
    near_limit = job is not None and slurm.early_timeout_signal(job, notice_margin(run, job.limit))
    return EndCause("timeout" if number == signal.SIGUSR2 and near_limit else "signal")


def _record_end(
    run: RunDir,
    attempt: int,
    cause: EndCause,
    noticed: float | None = None,
    last_step: tuple[int, float] | None = None,
) -> None:
    """The ranks ended without writing to the journal: record what is known, and how far they had come."""
    progress = run.progress()
    seen = progress if progress is not None and progress.attempt == attempt else None
    # The progress report may be older than the failure.
    reached, at = last_step or (None, None)
    steps = [step for step in (seen.step if seen else None, cause.failure.step, reached) if step is not None]
    last_seen = max((when for when in (seen.last_beat if seen else None, at) if when is not None), default=None)
    run.record(
        Event.INTERRUPTED,
        attempt=attempt,
        cause=cause.cause,
        failure=records.known(cause.failure),
        reached=max(steps, default=None),
        last_seen=last_seen,
        **({} if noticed is None else {"noticed": noticed}),
    )


def ask(job_id: str, timeout: float = slurm.ANSWER_SECONDS) -> slurm.JobInfo | None:
    """Slurm's record of a job; None, with a warning, where Slurm does not answer."""
    try:
        return slurm.show_job(job_id, timeout)
    except SchedulerError as error:
        log.warning("%s", error)
        return None
