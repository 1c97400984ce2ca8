"""What Slurm says of one job, and why it is being stopped."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

# States in which Slurm will do nothing more with a job by itself.
_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"

ENDED = frozenset(_ENDED.split())

EARLY_SIGNAL_SECONDS = 60
"""sbatch --signal: "may be sent up to 60 seconds earlier than specified"."""

MAX_MARGIN_SECONDS = 90.0
"""What a save gets before the limit, less an eighth that the supervisor decides in (supervisor/time_limit.py)."""

MAX_LIMIT_SECONDS = 300 * 86400.0
"""Slurm shows a job without a limit as one of 365 days."""


def stop_margin(limit: float) -> float:
    """Seconds before the end of a time limit of `limit` seconds to stop at: a fifth of it, at most 90."""
    return min(MAX_MARGIN_SECONDS, 0.2 * limit)


def current_job() -> str | None:
    """The id of the Slurm job this process is in, or None; of a task of an array as `task_id` has it."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return task_id(array, os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    return os.environ.get("SLURM_JOB_ID")


def task_id(array: str, task: int | str) -> str:
    """The id of one task of a job array, as Slurm's commands take it: by its own number some of them mean all tasks."""
    return f"{array}_{task}"


@dataclass(frozen=True)
class JobInfo:
    """What `scontrol show job` says of one job, as far as jobkit cares."""

    job_id: str
    state: str
    reason: str
    preempt_time: float | None
    """When Slurm chose this job to make room, or when the grace time after that was over."""
    start: float | None
    """When this start of it began, seconds since the epoch."""
    end: float | None
    """When its time is over."""
    elapsed: float
    """Seconds it has been running, those of a prolog included; within the job by the controller's clock."""
    restarts: int
    nodes: str
    partition: str = ""
    requeueable: bool = True
    """Whether it was submitted, or the cluster is set up, so that `scontrol requeue` takes it."""
    excluded: str = ""
    """ExcNodeList, as Slurm writes it."""
    script: str = ""
    """The batch script that it was submitted with."""
    dependency: str = ""
    """What it waits for still, in sbatch's words; known of a job in a list of jobs."""

    @property
    def limit(self) -> float | None:
        """Seconds this start of it may run."""
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def remaining(self) -> float | None:
        """Seconds until its time is over."""
        if self.limit is None or self.limit > MAX_LIMIT_SECONDS:
            return None
        return self.limit - self.elapsed

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def runs(self, script: Path) -> bool:
        """Whether it is a job of this batch script: another cluster, or one that counts anew, has the same ids."""
        return not self.script or are_same(Path(self.script), script)

    def is_anothers(self, script: Path) -> bool:
        """Whether it is surely no job of this batch script, nor of a copy of it: a controller that was killed has lost
        the newest jobs, and gives their ids again."""
        own = Path(self.script)
        if not self.script or self.runs(script) or not os.path.lexists(own):  # which another host may have elsewhere
            return False
        return own.parts[-4:] not in (script.parts[-4:], script.resolve().parts[-4:])

    def was_moved_to(self, script: Path) -> bool:
        """Whether it may be a job of this batch script under an earlier path, of a folder that was renamed since."""
        before = Path(self.script)
        return before.parts[-3:] == script.parts[-3:] and before != script and not os.path.lexists(before)

    @property
    def held(self) -> bool:
        """Whether it waits until somebody releases it, as after a prolog that failed."""
        return not self.ended and "held" in self.reason.lower()

    @property
    def requeued_by_slurm(self) -> bool:
        """Whether its processes are ending and it is in the queue again already.

        Within the job Slurm's count of restarts tells it at once, elsewhere a second later that its end is not known.
        """
        own = os.environ.get("SLURM_RESTART_COUNT") or ("0" if current_job() == self.job_id else None)
        restarted = own is not None and self.restarts > int(own)
        return self.state == "COMPLETING" and (self.end is None or restarted)

    @property
    def script_died(self) -> bool:
        """Whether the batch script was killed: its ranks are being ended, and nobody is left to requeue the job."""
        return self.reason == "JobLaunchFailure" and self.state in ("COMPLETING", "FAILED")


def are_same(one: Path, other: Path) -> bool:
    """Whether two paths are one file."""
    if one == other:
        return True
    with contextlib.suppress(OSError):  # one folder may have two names, as behind a link
        return one.samefile(other)
    return False


def parse_job(text: str) -> JobInfo:
    """A JobInfo of `scontrol --oneliner show job`'s words."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    task = fields.get("ArrayTaskId", "")
    return JobInfo(
        job_id=task_id(fields["ArrayJobId"], task) if task.isdigit() else fields.get("JobId", ""),
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        preempt_time=time_of(fields.get("PreemptTime")),
        start=time_of(fields.get("StartTime")),
        end=time_of(fields.get("EndTime")),
        elapsed=_duration(fields.get("RunTime", "")),
        restarts=int(fields.get("Restarts", 0)),
        nodes=value_of(fields.get("NodeList")),
        partition=fields.get("Partition", ""),
        requeueable=fields.get("Requeue", "1") != "0",
        excluded=value_of(fields.get("ExcNodeList")),
        script=value_of(script[1] if (script := re.search(r" Command=(.*?) WorkDir=", text)) else None),
    )


def value_of(text: str | None) -> str:
    """A field of a record; empty where Slurm says that there is none."""
    return "" if text in (None, "(null)") else str(text)


def _duration(text: str) -> float:
    """Seconds of `[days-]hours:minutes:seconds`; 0 where it is something else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def time_of(text: str | None) -> float | None:
    """Seconds since the epoch of a time that Slurm printed, in UTC; None where it is none."""
    try:
        return datetime.fromisoformat(text or "").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:  # None, Unknown, N/A
        return None


def stop_cause(job: JobInfo, margin: float = 0.0) -> str | None:
    """Why Slurm sends this running job signals: preempted, timeout, cancelled, killed; None where it gives no reason.

    `margin` is how many seconds before its time limit a job of ours stops.
    SIGTERM means both preemption and scancel, USR2 both preemption and the time limit: only the job's record tells.
    """
    # The order matters: a job that is being requeued or ended is COMPLETING, as one that is cancelled.
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        return "timeout"
    if job.script_died:
        return "killed"
    if job.requeued_by_slurm or job.state == "PREEMPTED":
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
    if job.remaining is not None and job.state == "RUNNING" and job.remaining <= margin:
        return "timeout"
    return None


def early_timeout_signal(job: JobInfo, margin: float) -> bool:
    """Whether a USR2 that came now may be --signal's, which Slurm sends up to a minute before it was asked to."""
    return job.remaining is not None and job.remaining <= margin + EARLY_SIGNAL_SECONDS + 5  # the signal's own way
