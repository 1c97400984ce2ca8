"""Slurm's jobs: its record of a job, the reason why it stops one, and the requests that change one.

In: a job id (`12`, or `12_3` for a task of an array). Out: a Job, or a SchedulerError. The supervisor asks about its
own job (`show`, `stop_cause`, `requeue`), the commands about all of a user's jobs at once (`queue`). pending.py has the
words for a job that waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Literal

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.slurm.commands import ANSWER_SECONDS, EVEN_HIDDEN, config, fields, is_away, run

StopCause = Literal["preempted", "cancelled", "timeout", "node_failure", "out_of_memory", "killed"]
"""`preempted` includes every requeue that jobkit did not ask for; `killed`: the batch script was killed."""

_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"

ENDED = frozenset(_ENDED.split())
"""States in which Slurm does nothing more with a job by itself."""

NO_LIMIT_SECONDS = 300 * 86400.0
"""Slurm shows a job without a time limit as a job of 365 days."""

SHORTEST_LIMIT_SECONDS = 60.0
"""Slurm counts time limits in minutes."""


@dataclass(frozen=True)
class Job:
    """Slurm's record of one job. `queue` does not fill in the fields after `comment`."""

    job_id: str
    state: str
    reason: str
    start: float | None
    """Seconds since the epoch by the controller's clock: the begin of this start of the job."""
    end: float | None
    """The end of its time limit or of its grace time; of a job that has ended, its end."""
    nodes: str
    partition: str
    comment: str
    restarts: int = 0
    preempt_time: float | None = None
    """The moment in which Slurm chose this job to make room, or in which the grace time after that was over."""
    requeueable: bool = True
    """False for `--no-requeue`, and on a cluster with JobRequeue=0: Slurm refuses `scontrol requeue`."""
    excluded: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def runs(self) -> bool:
        """True while Slurm lets the processes of the job run. SIGNALING is shown while it sends them a signal."""
        return self.state in ("RUNNING", "CONFIGURING", "SIGNALING", "RESIZING", "SUSPENDED", "STOPPED")

    @property
    def held(self) -> bool:
        """True if the job waits until somebody releases it, as after a prolog that failed."""
        return not self.ended and "held" in self.reason.lower()

    @property
    def script_died(self) -> bool:
        """True if the batch script was killed: Slurm ends the ranks, and no process is left to requeue the job."""
        # Slurm 22.05 says JobLaunchFailure, 26.05 says RaisedSignal:9(Killed).
        return self.reason.startswith(("JobLaunchFailure", "RaisedSignal:")) and self.state in ("COMPLETING", "FAILED")

    @property
    def task(self) -> int | None:
        """The index of a task of an array."""
        _, _, task = self.job_id.partition("_")
        return int(task) if task.isdigit() else None

    def is_requeued(self, now: float, restarts: int | None = None) -> bool:
        """True if the job is back in the queue, or runs again: the caller's processes belong to an earlier start.

        `restarts` is the caller's `restart_count`. Outside of the job, the end tells: while the processes of a requeued
        job end, Slurm shows none, or the end of its next start. Of a job that is over it shows a moment before now.
        """
        if self.state == "COMPLETING" and (self.end is None or self.end > now + SHORTEST_LIMIT_SECONDS / 2):
            return True
        return restarts is not None and self.restarts > restarts and not self.ended


# Asking


def show(job_id: str, timeout: float = ANSWER_SECONDS) -> Job | None:
    """The job; None if Slurm answers that it knows no such job, as MinJobAge (300 s) after a job's end.

    Slurm forgets at once a task of an array that is cancelled before it starts.
    """
    try:
        records = run("scontrol", "--oneliner", EVEN_HIDDEN, "show", "job", job_id, timeout=timeout)
    except SchedulerError as error:
        if any(words in str(error) for words in ("Invalid job id", f"Job {job_id} not found")):
            return None
        raise
    return parse_job(records.partition("\n")[0])  # an array's own id has a line for its waiting tasks first


def parse_job(record: str) -> Job:
    """The job of one line of `scontrol --oneliner show job`."""
    values = fields(record)
    task = values.get("ArrayTaskId", "")
    return Job(
        job_id=f"{values['ArrayJobId']}_{task}" if task.isdigit() else values["JobId"],
        state=values["JobState"],
        reason=values.get("Reason", ""),
        start=parse_time(values.get("StartTime", "")),
        end=parse_time(values.get("EndTime", "")),
        nodes=values.get("NodeList", ""),
        partition=values.get("Partition", ""),
        comment=values.get("Comment", ""),
        restarts=int(values.get("Restarts", 0)),
        preempt_time=parse_time(values.get("PreemptTime", "")),
        requeueable=values.get("Requeue") != "0",
        excluded=values.get("ExcNodeList", ""),
    )


def queue(user: str | None = None, timeout: float = ANSWER_SECONDS) -> list[Job]:
    """All jobs of a user (`a,b`: of several; None: of this one) that Slurm remembers, by one question.

    Each waiting task of an array is a job of its own.
    """
    whose = "--me" if user is None else f"--user={user}"
    columns = "--format=%i|%T|%S|%e|%N|%P|%r|%k"  # the comment last: it may hold the separator
    answer = run("squeue", EVEN_HIDDEN, "--array", "--noheader", "--states=all", whose, columns, timeout=timeout)
    rows = (line.split("|", 7) for line in answer.splitlines() if line.count("|") >= 7)
    return [
        Job(job_id, state, reason, parse_time(start), parse_time(end), nodes, partition, comment.removeprefix("(null)"))
        for job_id, state, start, end, nodes, partition, reason, comment in rows
    ]


def by_token(jobs: Iterable[Job]) -> dict[tuple[str, int | None], list[Job]]:
    """Jobs by (word of the comment, index in the array): an array's tasks share the token of their submission."""
    index: dict[tuple[str, int | None], list[Job]] = {}
    for job in jobs:
        for word in job.comment.split():
            index.setdefault((word, job.task), []).append(job)
    return index


def with_token(jobs: Iterable[Job], token: str, task: int | None = None) -> list[Job]:
    """The jobs whose comment holds a token; for many tokens, look them up in one `by_token`."""
    return by_token(jobs).get((token, task), [])


def current_job(environ: Mapping[str, str]) -> str | None:
    """The id of the job that an environment belongs to, or None.

    The SLURM_JOB_ID of an array's first task is the id of the whole array: scancel with it ends all tasks.
    """
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return environ.get("SLURM_JOB_ID")


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the job of an environment had been requeued when this start of it began."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


# The clock, and the cause of a stop


def controller_time() -> float:
    """Now by the controller's clock, which alone decides about time limits: a node's clock may be minutes off."""
    return time.time() + _clock_offset(round(time.time() - time.monotonic()))  # a clock that was set: asked again


@cache
def _clock_offset(set_to: int) -> float:
    before = time.time()
    try:
        answer = run("sdiag")
    except SchedulerError as error:
        if is_away(error):
            raise  # not kept: the next question may be answered
        return 0.0  # a site may refuse sdiag to its users
    printed = re.search(r"output at .*\((\d+)\)", answer)
    now, after = float(printed[1]) if printed else before, time.time()
    return 0.0 if before - 1 <= now <= after + 1 else now - (before + after) / 2


def time_left(job: Job, now: float) -> float | None:
    """Seconds until Slurm ends a running job for its time limit (or its grace time); None without a limit.

    `now` is `controller_time()`. The limit runs from StartTime on: a prolog counts, though no process of ours ran.
    """
    if job.state == "PENDING" or job.start is None or job.end is None or job.end - job.start > NO_LIMIT_SECONDS:
        return None
    return job.end - now


def stop_cause(job: Job, now: float, margin: float = 0.0, restarts: int | None = None) -> StopCause | None:
    """Why Slurm stops this job; None if the record gives no reason.

    `margin` is how long before its time limit a job of ours stops; `restarts` the caller's `restart_count`.
    Only the record tells: SIGTERM means a preemption or a scancel, SIGUSR2 a preemption or the time limit.
    """
    # The order matters: a job that is being requeued, ended or cancelled is COMPLETING.
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        return "timeout"
    if job.script_died:
        return "killed"
    if job.is_requeued(now, restarts) or job.state == "PREEMPTED":
        return "preempted"
    if job.state == "NODE_FAIL" or job.reason == "NodeDown":
        return "node_failure"
    if job.state == "COMPLETING" and job.preempt_time and job.end is not None and job.end <= job.preempt_time + 1:
        return "preempted"  # PreemptMode=CANCEL, without grace or after it; a scancel in the grace time ends later
    if job.state in ("CANCELLED", "COMPLETING"):
        return "cancelled"  # before the next: a job may be cancelled while it is being preempted
    if job.state == "OUT_OF_MEMORY":
        return "out_of_memory"
    if job.preempt_time is not None:
        return "preempted"
    seconds = time_left(job, now)
    return "timeout" if seconds is not None and job.runs and seconds <= margin else None


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a time that `commands.run` got in UTC; None for Unknown, None and N/A."""
    if text[:1] not in ("1", "2"):  # most waiting jobs have none; an exception for each of 10,000 is slow
        return None
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


# Changing


def requeue(job_id: str, restarts: int | None = None) -> bool:
    """Put a job back into the queue as the same job; False if its owner has cancelled it.

    Within the job, `restarts` is `restart_count(os.environ)`. Raises SchedulerError: where `is_away(error)` is False,
    Slurm refuses (JobRequeue=0, `--no-requeue`) and a successor job has to follow.
    """
    for _ in range(3):  # the state may change between the look and the command
        job = show(job_id)
        now = controller_time()
        if job is not None and (job.state == "PENDING" or job.is_requeued(now, restarts)):
            return True
        if job is not None and stop_cause(job, now) == "cancelled":
            return False  # a plain requeue would undo the scancel
        # `Incomplete` leaves a job alone that is cancelled in this moment, and reports no error: so look again.
        only_running = ["Incomplete"] if job is not None and job.runs else []
        try:
            run("scontrol", "requeue", *only_running, job_id)
        except SchedulerError as error:
            if "pending execution" in str(error):  # Slurm has requeued it since the look
                return True
            raise
        if not only_running:
            return True
    raise SchedulerTimeout(f"scontrol requeue: job {job_id} still runs")


def cancel(*job_ids: str) -> None:
    """End jobs for good; a job that is gone already is no error."""
    try:
        run("scancel", *job_ids)
    except SchedulerError as error:  # it may have ended since the caller's look
        if not any(words in str(error) for words in ("Invalid job id", "already completing or completed")):
            raise


def exclude_nodes(job_id: str, nodes: str) -> None:
    """Replace the list of nodes that a job may not get, the user's included; Slurm takes it after the requeue only."""
    run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}")


def begin_later(job_id: str, seconds: float) -> None:
    """Let a job that was requeued begin so many seconds from now, at the earliest.

    Slurm itself lets it wait until the credentials of its last start have expired, from the end of its processes on.
    Slurm 22.05 forgets that wait for a StartTime, an earlier one too; so none is set that may be earlier.
    """
    settings = config()
    expire = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    slurms_delay = float(expire[1] if expire else 120) + float(settings.get("KillWait", "30 sec").split()[0])
    if seconds > slurms_delay:
        run("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{seconds:.0f}")


def depend(job_id: str, others: Sequence[str]) -> None:
    """Let a job wait until others have ended, however they end; Slurm takes this after the requeue only."""
    run("scontrol", "update", f"JobId={job_id}", f"Dependency={afterany(others)}")


def afterany(job_ids: Sequence[str]) -> str:
    """Return sbatch's words for a job that starts once others have ended."""
    return f"afterany:{':'.join(job_ids)}"
